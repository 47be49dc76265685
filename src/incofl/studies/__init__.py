"""Studies of many runs: paired comparisons, and the paper's experiments at three scales beside its numbers."""
