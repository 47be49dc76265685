"""Rounds, runs, executors, records."""

from incofl.engine.load import load_model
from incofl.engine.round import run_round
from incofl.engine.run import run

__all__ = ["load_model", "run", "run_round"]
