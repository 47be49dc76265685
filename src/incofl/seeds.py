"""Every random stream follows from (seed, purpose, round, client): no executor, order or resume can change it."""

from enum import IntEnum

import numpy as np
import torch

# What a stream is for. The order gives the numbers, which are part of every recorded result: only append.
Purpose = IntEnum(
    "Purpose",
    "MODEL LIMIT PARTITION COHORT TRAINING MEASURING LAYERS UPLOAD_NOISE DEEP_NOISE TEST_LIMIT ANALYSIS SHUFFLE "
    "RESTART RANKS WINDOWS PRIVACY ATTACK",
    start=0,
)


def numpy_rng(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
    """A NumPy stream."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, round, client)))


def seed_of(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed for libraries that want a number."""
    state = np.random.SeedSequence(seed, spawn_key=(purpose, round, client)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def torch_rng(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> torch.Generator:
    """A torch stream."""
    return torch.Generator().manual_seed(seed_of(seed, purpose, round, client))
