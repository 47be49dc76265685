"""Numbers of layers by round: shallow layers against the deep ones that InCo pairs with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from incofl.layout import Layout
from incofl.statistics import SignTest, sign_test

Array = NDArray[np.float64]
Record = Mapping[str, float]  # numbers of a layer in a round; not a number where one is undefined


def groups_of(layout: Layout) -> dict[str, str]:
    """Maps each layer that InCo pairs to the shallow one of its group; group by group, the shallow one first."""
    groups: dict[str, list[str]] = {}
    for deep, shallow in layout.shallow.items():
        groups.setdefault(shallow, [shallow]).append(deep)
    return {name: shallow for shallow, names in groups.items() for name in names}


@dataclass(frozen=True)
class Contest:
    """How often the shallow layer of a group has a larger value than a deep one."""

    pairs: SignTest  # over pairs of a deep layer and a round; rounds are not independent, so its p-value is too small
    layers: SignTest  # the careful test: a deep layer has one vote
    by_group: dict[str, float]  # the share of pairs
    lowest_above_highest: dict[str, bool]  # in each group, over all rounds and deep layers


@dataclass(frozen=True)
class Layers:
    """Numbers of layers by round, in groups of a shallow layer and the deep ones that InCo pairs with it."""

    group_of: dict[str, str]  # the shallow layer of each layer; group by group, the shallow one first
    rounds: list[int]
    numbers: dict[str, Array]  # by layer and round; not a number where there is none

    @classmethod
    def of(cls, group_of: Mapping[str, str], records: Mapping[str, Mapping[int, Record]]) -> "Layers":
        """Collects the records of layers by round; layers without any are left out."""
        known = {name: own for name in group_of if (own := records.get(name))}
        rounds = sorted({round for own in known.values() for round in own})
        keys = dict.fromkeys(key for own in known.values() for record in own.values() for key in record)
        rows = {k: [[own.get(r, {}).get(k, np.nan) for r in rounds] for own in known.values()] for k in keys}
        numbers = {key: np.array(row, dtype=np.float64) for key, row in rows.items()}
        return cls({name: group_of[name] for name in known}, rounds, numbers)

    def rows(self, what: str) -> dict[str, Array]:
        """Returns the known values of one number, by layer."""
        known = {name: row[np.isfinite(row)] for name, row in zip(self.group_of, self.numbers[what], strict=True)}
        return {name: row for name, row in known.items() if len(row)}

    def shallow_larger(self, values: Array, vote: Callable[[Array], Any]) -> Contest:
        """Compares each shallow layer with its deep ones, round by round; ``vote`` sums up the rounds of a layer."""
        names, lead = list(self.group_of), dict[str, Array]()
        above: dict[str, bool] = {}
        for at, (name, head) in enumerate(self.group_of.items()):
            shallow = values[names.index(head)] if head in names else np.full(len(self.rounds), np.nan)
            gaps = (shallow - values[at])[np.isfinite(shallow - values[at])]
            if name != head and len(gaps):
                lead[name] = gaps
                above[head] = above.get(head, True) and bool(np.nanmin(shallow) > np.nanmax(values[at]))
        wins = {head: [gap > 0 for name in lead if self.group_of[name] == head for gap in lead[name]] for head in above}
        return Contest(
            pairs=sign_test([float(gap) for gaps in lead.values() for gap in gaps]),
            layers=sign_test([float(vote(gaps)) for gaps in lead.values()]),
            by_group={head: float(np.mean(own)) for head, own in wins.items()},
            lowest_above_highest=above,
        )

    def json(self, **more: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all numbers by layer, and more of each."""
        found: dict[str, Any] = {}
        for at, (name, head) in enumerate(self.group_of.items()):
            numbers = {key: values[at] for key, values in self.numbers.items()}
            extra = {key: values[name] for key, values in more.items()}
            found[name] = {"group": head, "role": role(name, head), **extra, **numbers}
        return {"rounds": self.rounds, "layers": found}


def role(name: str, head: str) -> str:
    """Returns what a layer is in its group."""
    return "shallow" if name == head else "deep"
