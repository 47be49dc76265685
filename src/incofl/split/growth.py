"""Growth: larger levels open during a run; until then their clients train the largest level that is open.

Progressive training of one model is old (Net2Net, Chen et al. 2016); ProFL and NeuLite (2025) do it in federations. A
level that opens starts from the state of the next smaller one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from incofl.errors import ConfigError

OPEN = "open"  # the key of a round's row that says which level was the largest open one
WINDOW = 5  # rounds over which losses are averaged
LEAST_FALL = 0.02  # a loss that falls by less than this share from one window to the next has stopped falling


@dataclass(frozen=True)
class Growth:
    """When each level but the smallest opens."""

    opens: tuple[int, ...] | None = None  # the number of finished rounds; None: when the loss stops falling
    levels: int = 1

    def top(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """The largest level that is open after the rounds of some rows of ``metrics.jsonl``."""
        if self.opens is not None:
            return sum(len(rows) >= opens for opens in self.opens)
        if not rows:
            return 0
        top = int(rows[-1][OPEN])
        losses = [row["loss"] for row in rows[-2 * WINDOW :] if row[OPEN] == top and row["loss"] is not None]
        stopped = len(losses) == 2 * WINDOW and fmean(losses[WINDOW:]) > (1 - LEAST_FALL) * fmean(losses[:WINDOW])
        return min(top + stopped, self.levels - 1)


def make_growth(grow: str | Sequence[float] | None, levels: int, rounds: int) -> Growth | None:
    """The growth that ``split.grow`` describes; ``None``: all levels are open from the start."""
    if grow is None or isinstance(grow, str):
        return None if grow is None else Growth(None, levels)
    opens = tuple(round(entry * rounds) if entry < 1 else round(entry) for entry in grow)
    if len(opens) != levels - 1 or list(opens) != sorted(opens):
        expected = f"{levels - 1} numbers, from small to large, one for each level but the smallest"
        raise ConfigError(f"split.grow: got {list(grow)}, expected {expected}")
    return Growth(opens, levels)
