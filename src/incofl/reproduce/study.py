"""A study is a table of the paper: rows under columns, each cell a config, some with the paper's number.

Studies say what is compared, scales how large the runs are. Both are TOML files beside this one. A run belongs to a
scale, not to a study: what several tables need is run once.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from incofl.config import Config, make_config
from incofl.errors import ConfigError, nearest

FILES = resources.files("incofl.reproduce")
STUDIES = ("table1", "table2", "case-study", "ablation", "robustness", "noise", "rules", "buffers")
SCALES = ("mini", "small", "paper")
Claim = Literal["up", "down"]


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        name: what it is called.
        set: the config keys that make it.
        against: the row that it is compared to.
        paper: the paper's numbers, in the order of all columns; ``None`` where it gives none.
        claim: the direction in which the paper says that it differs, where it gives no numbers.
    """

    name: str
    set: tuple[str, ...]
    against: str | None = None
    paper: tuple[float | None, ...] = ()
    claim: Claim | None = None


@dataclass(frozen=True)
class Section:
    """Rows that share a base config of the scale."""

    name: str
    base: str
    rows: tuple[Row, ...]
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A table of the paper.

    Attributes:
        name: what it is called on the command line.
        title: what it shows.
        columns: the config keys of each column.
        scales: which columns each scale has.
        sections: its rows.
        note: what a reader must know.
    """

    name: str
    title: str
    columns: dict[str, tuple[str, ...]]
    scales: dict[str, tuple[str, ...]]
    sections: tuple[Section, ...]
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """How large runs are: base configs by name, seeds, and over how many last rounds accuracy is averaged."""

    name: str
    summary: str
    seeds: tuple[int, ...]
    tail: int
    bases: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One number of a table: a row under a column."""

    section: str
    row: str
    column: str
    against: str | None
    paper: float | None
    claim: Claim | None
    configs: dict[int, Config]  # by seed


def load_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise ConfigError(f"NAME: got {name!r}, expected one of {', '.join(STUDIES)}, or all{nearest(name, STUDIES)}")
    tree = tomllib.loads((FILES / "studies" / f"{name}.toml").read_text())
    columns = {column: tuple(keys) for column, keys in tree["columns"].items()}
    sections = tuple(
        Section(
            section["name"],
            section["base"],
            tuple(_row(row, len(columns)) for row in section["rows"]),
            tuple(section.get("set", ())),
        )
        for section in tree["sections"]
    )
    scales = {scale: tuple(tree.get("scales", {}).get(scale, columns)) for scale in SCALES}
    return Study(name, tree["title"], columns, scales, sections, tree.get("note", ""))


def _row(row: dict[str, Any], columns: int) -> Row:
    paper = tuple(None if value == "none" else value for value in row.get("paper", []))
    if paper and len(paper) != columns:
        raise ConfigError(f"row {row['name']!r}: got {len(paper)} numbers of the paper, expected {columns}")
    return Row(row["name"], tuple(row["set"]), row.get("against"), paper or (None,) * columns, row.get("claim"))


def load_scale(name: str) -> Scale:
    """The scale of that name."""
    if name not in SCALES:
        raise ConfigError(f"--scale: got {name!r}, expected one of {', '.join(SCALES)}{nearest(name, SCALES)}")
    tree = tomllib.loads((FILES / "scales" / f"{name}.toml").read_text())
    return Scale(name, tree["summary"], tuple(tree["seeds"]), tree["tail"], tree["base"])


def cells(
    study: Study, scale: Scale, overrides: tuple[str, ...] = (), seeds: tuple[int, ...] | None = None
) -> list[Cell]:
    """All cells of a study at a scale. Cells of one seed differ in the keys of their row and column alone."""
    return [
        Cell(
            section.name,
            row.name,
            column,
            row.against,
            row.paper[list(study.columns).index(column)],
            row.claim,
            {
                seed: make_config(
                    scale.bases[section.base],
                    [*section.set, *study.columns[column], *row.set, f"seed={seed}", *overrides],
                )
                for seed in seeds or scale.seeds
            },
        )
        for section in study.sections
        for row in section.rows
        for column in study.scales[scale.name]
    ]


def run_name(config: Config) -> str:
    """Names a run by everything that makes it, so that studies share it; the seed is left to the caller."""
    # Places and processes do not make a run; keys at their defaults are left out, so that new ones rename no run.
    defaults = Config().flat()
    values = {
        key: value
        for key, value in config.flat().items()
        if value != defaults[key] and not key.startswith(("seed", "engine.", "data.root"))
    }
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.method}-{digest}"
