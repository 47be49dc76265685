"""Numbers of layers by round: shallow layers against the deep ones that InCo pairs with them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from incofl.analysis.plots import drawn, layer_axis, look
from incofl.layout import Layout
from incofl.statistics import SignTest, sign_test

Array = NDArray[np.float64]
Record = Mapping[str, float]  # numbers of a layer in a round; not a number where one is undefined
Span = Callable[[Array], Iterable[float]]  # low, middle and high value of a layer's rounds
LOOKS = {"shallow": look(0, ls=""), "deep": look(1, ls="")}


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

    def role(self, name: str) -> str:
        return "shallow" if name == self.group_of[name] else "deep"

    @property
    def span(self) -> str:
        return f"{self.rounds[0]}-{self.rounds[-1]}"

    def group(self, head: str) -> "Layers":
        chosen = [own == head for own in self.group_of.values()]
        numbers = {key: values[chosen] for key, values in self.numbers.items()}
        return Layers({name: own for name, own in self.group_of.items() if own == head}, self.rounds, numbers)

    def rows(self, what: str) -> dict[str, Array]:
        """Returns the known values of one number, by layer."""
        rows = zip(self.group_of, self.numbers.get(what, ()), strict=what in self.numbers)
        return {name: known for name, row in rows if len(known := row[np.isfinite(row)])}

    def means(self, what: str) -> dict[str, float]:
        """Returns the mean of one number over the rounds, by layer."""
        return {name: float(row.mean()) for name, row in self.rows(what).items()}

    def shallow_larger(self, values: Array, vote: Callable[[Array], Any]) -> Contest:
        """Compares each shallow layer with its deep ones, round by round; ``vote`` sums up the rounds of a layer."""
        value_of = dict(zip(self.group_of, values, strict=True))
        leads: dict[str, list[Array]] = {}  # of a shallow layer over each of its deep ones, in the rounds of both
        above: dict[str, bool] = {}
        for name, head in self.group_of.items():
            lead = value_of[head] - value_of[name] if head in value_of else np.array([])
            if name != head and len(known := lead[np.isfinite(lead)]):
                leads.setdefault(head, []).append(known)
                above[head] = above.get(head, True) and bool(np.nanmin(value_of[head]) > np.nanmax(value_of[name]))
        each = [lead for group in leads.values() for lead in group]
        return Contest(
            pairs=sign_test([float(gap) for lead in each for gap in lead]),
            layers=sign_test([float(vote(lead)) for lead in each]),
            by_group={head: float(np.mean(np.concatenate(group) > 0)) for head, group in leads.items()},
            lowest_above_highest=above,
        )

    def json(self, **more: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all numbers by layer, and more of each."""
        found = {
            name: {"group": head, "role": self.role(name)}
            | {key: values[name] for key, values in more.items()}
            | {key: values[at] for key, values in self.numbers.items()}
            for at, (name, head) in enumerate(self.group_of.items())
        }
        return {"rounds": self.rounds, "layers": found}

    def draw(self, path: Path, title: str, panels: Mapping[str, str], span: Span, marks: Mapping[str, Record]) -> None:
        """Draws some numbers, a panel each: the span of each layer as a dot on a bar, and marks in the first panel."""
        names = list(self.group_of)
        with drawn(path, title, (3.0, 0.24 * len(names) + 0.7), len(panels), sharey=True) as drawings:
            for axes, (what, label) in zip(drawings, panels.items(), strict=True):
                for name, row in self.rows(what).items():
                    (low, middle, high), kind = span(row), self.role(name)
                    axes.hlines(names.index(name), low, high, color=LOOKS[kind]["color"], lw=2, alpha=0.45)
                    axes.plot(middle, names.index(name), **LOOKS[kind], label=f"{kind} layer")
                axes.set_xlabel(label)
            for meaning, values in marks.items():
                for name, value in values.items():
                    drawings[0].plot(value, names.index(name), "k|", ms=9, mew=1.4, label=meaning)
            layer_axis(drawings[0], names)
