"""Rounds, runs, executors, records."""

from incofl.engine.round import run_round
from incofl.engine.run import run

__all__ = ["run", "run_round"]
