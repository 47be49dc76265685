"""Components 2 and 3 of the paper: internal cross-layer gradients and the alleviation of their divergence."""

from incofl.inco.cross_layer import mix
from incofl.inco.transform import InCo

__all__ = ["InCo", "mix"]
