"""Small text data sets in their original formats, and federations on them."""

import json
import random
from pathlib import Path
from typing import Any

from incofl.config import Config, make_config

WORDS = [
    "the",
    "king",
    "my",
    "lord",
    "what",
    "is",
    "thy",
    "name",
    "good",
    "night",
    "sweet",
    "prince",
    "and",
    "farewell",
]


def line(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_shakespeare(root: Path, roles: int = 8, speeches: int = 6) -> Path:
    """A play of some roles, who speak in turn about 150 characters each time."""
    rng = random.Random(0)
    blocks = [
        f"Role {role}:\n{line(rng, 15).capitalize()},\n{line(rng, 15)}."
        for _ in range(speeches)
        for role in range(roles)
    ]
    path = root / "tinyshakespeare.txt"
    path.write_text("\n\n".join(blocks) + "\n")
    return path


def write_sst2(root: Path, sentences: int = 60) -> Path:
    """Sentences of two classes that differ in one word, as GLUE has them: without labels in the test file."""
    rng = random.Random(0)
    folder = root / "sst2"
    folder.mkdir(parents=True)
    for name in ("train", "dev"):
        rows = [f"{line(rng, rng.randint(1, 9))} {('bad', 'good')[i % 2]} \t{i % 2}" for i in range(sentences)]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    (folder / "test.tsv").write_text("index\tsentence\n0\tuneasy mishmash\n")
    return folder


def write_imdb(root: Path, reviews: int = 40) -> Path:
    """Reviews of two classes that differ in one word."""
    rng = random.Random(0)
    entries = [{"t": f"{line(rng, 30)}<br /><br />{('Bad', 'Good')[i % 2]}! {i}", "s": i % 2} for i in range(reviews)]
    path = root / "imdb" / "reviews.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(entries))
    return path


def text_config(root: Path, model: str, *overrides: str) -> Config:
    """Six speaking roles, three sizes of a network of a few thousand parameters."""
    settings: dict[str, Any] = {
        "method": "incoavg",
        "rounds": 2,
        "cohort": 4,
        "data": {"name": "shakespeare", "root": str(root), "clients": 6},
        "model": {"name": model},
        "split": {"levels": 3},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.01},
    }
    return make_config(settings, overrides)
