"""Component 1 of the paper: model splitting. Every client trains the part of the server model that fits it."""

from incofl.split.depth import Depth, num_depths
from incofl.split.slice import Slice, cut
from incofl.split.splitter import Depths, Kind, Levels, SplitRule, Splitter, WidthRule, Window, make_splitter, shares_of
from incofl.split.submodel import submodel

__all__ = [
    "Depth",
    "Depths",
    "Kind",
    "Levels",
    "Slice",
    "SplitRule",
    "Splitter",
    "WidthRule",
    "Window",
    "cut",
    "make_splitter",
    "num_depths",
    "shares_of",
    "submodel",
]
