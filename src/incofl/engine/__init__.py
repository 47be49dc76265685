"""Rounds, runs, executors, records."""
