"""A study is a table of the paper: rows under columns, each cell a config, some with the paper's number.

Studies say what is compared, scales how large the runs are; both are TOML files in this folder. A run belongs to a
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

FILES = resources.files("incofl.studies")
STUDIES = ("table1", "table2", "case-study", "ablation", "robustness", "noise", "rules", "buffers")
SCALES = ("mini", "small", "paper")


@dataclass(frozen=True)
class Study:
    """A table of the paper.

    Attributes:
        name: name on the command line.
        title: what the table shows.
        note: what a reader must know.
        columns: config keys of each column.
        scales: columns that each scale has.
        sections: parts of the table, each with the name of its base config and its rows, as in the TOML file.
    """

    name: str
    title: str
    note: str
    columns: dict[str, list[str]]
    scales: dict[str, list[str]]
    sections: list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """The size of runs: base configs by name, seeds, and the number of last rounds over which accuracy is averaged."""

    name: str
    summary: str
    seeds: tuple[int, ...]
    tail: int
    bases: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        section: part of the table.
        row: name of the row in its section.
        column: name of the column.
        against: the row with which it is compared.
        paper: the paper's number; ``None`` where it gives none.
        claim: direction in which the paper says that it differs, where it gives no numbers.
        configs: config of each seed.
    """

    section: str
    row: str
    column: str
    against: str | None
    paper: float | None
    claim: Literal["up", "down"] | None
    configs: dict[int, Config]


def load_study(name: str) -> Study:
    """Reads the study of that name."""
    if name not in STUDIES:
        raise ConfigError(f"NAME: got {name!r}, expected one of {', '.join(STUDIES)}, or all{nearest(name, STUDIES)}")
    tree = tomllib.loads((FILES / "tables" / f"{name}.toml").read_text())
    columns = tree["columns"]
    scales = {scale: tree.get("scales", {}).get(scale, list(columns)) for scale in SCALES}
    return Study(name, tree["title"], tree.get("note", ""), columns, scales, tree["sections"])


def load_scale(name: str) -> Scale:
    """Reads the scale of that name."""
    if name not in SCALES:
        raise ConfigError(f"--scale: got {name!r}, expected one of {', '.join(SCALES)}{nearest(name, SCALES)}")
    tree = tomllib.loads((FILES / "scales" / f"{name}.toml").read_text())
    return Scale(name, tree["summary"], tuple(tree["seeds"]), tree["tail"], tree["base"])


def cells(
    study: Study, scale: Scale, overrides: tuple[str, ...] = (), seeds: tuple[int, ...] | None = None
) -> list[Cell]:
    """Returns all cells of a study at a scale; cells of one seed differ only in the keys of their row and column."""
    found = []
    for section, row in [(part, row) for part in study.sections for row in part["rows"]]:
        paper = dict(zip(study.columns, row.get("paper", ["none"] * len(study.columns)), strict=True))
        for column in study.scales[scale.name]:
            keys, base = [*study.columns[column], *row["set"]], scale.bases[section["base"]]
            configs = {seed: make_config(base, [*keys, f"seed={seed}", *overrides]) for seed in seeds or scale.seeds}
            number = None if paper[column] == "none" else paper[column]
            place = section["name"], row["name"], column
            found.append(Cell(*place, row.get("against"), number, row.get("claim"), configs))
    return found


def run_name(config: Config) -> str:
    """Names a run by everything that determines it except the seed, so that studies share it."""
    # Places and processes do not make a run; keys at their defaults are left out, so that new ones rename no run.
    defaults = make_config({"method": config.method}).flat()
    values = {
        key: value
        for key, value in config.flat().items()
        if value != defaults.get(key) and not key.startswith(("seed", "engine.", "data.root"))
    }
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{config.method}-{digest}"
