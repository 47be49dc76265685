"""Data sets from the Hugging Face Hub, written into ``data.root`` in their original formats.

Only ``incofl data fetch`` comes here: a run reads files and never loads anything from anywhere.
"""

import functools
import json
import logging
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from incofl.data import writers
from incofl.data.dataset import Examples
from incofl.data.sources import find_source
from incofl.data.verify import file_md5, record_path
from incofl.errors import DataError

Rows = Iterable[dict[str, Any]]
Split = Callable[[str], Rows]  # the rows of a split by its name


@dataclass(frozen=True)
class Remote:
    """A data set on the Hub.

    Attributes:
        repository: its name there.
        write: turns the rows of its splits into the original files, under a folder.
        subset: its configuration, where there are several.
        revision: the branch that holds it as plain files, where the main one has a loading script.
    """

    repository: str
    write: Callable[[Path, Split], None]
    subset: str | None = None
    revision: str | None = None

    @property
    def address(self) -> str:
        """Where people find it."""
        return f"https://huggingface.co/datasets/{self.repository}"

    def rows(self, split: str) -> Rows:
        """The rows of a split, loaded over the network or from the cache of ``datasets``."""
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what matters of a failure is in its exception
        loaded: Rows = datasets.load_dataset(self.repository, self.subset, split=split, revision=self.revision)
        return loaded


def images(
    writer: Callable[[Path, Examples, Examples], None], column: str = "image", mode: str = "RGB"
) -> Callable[[Path, Split], None]:
    """Writes labelled images: those of the splits ``train`` and ``test``."""

    def write(folder: Path, split: Split) -> None:
        writer(folder, _examples(split("train"), column, mode), _examples(split("test"), column, mode))

    return write


def sentences(folder: Path, split: Split) -> None:
    """Writes sentences with a label each: ``validation`` is what GLUE calls dev."""
    for name, rows in (("train", split("train")), ("dev", split("validation"))):
        writers.write_tsv(folder / "sst2" / f"{name}.tsv", [(row["sentence"], row["label"]) for row in rows])


def reviews(folder: Path, split: Split) -> None:
    """Writes reviews with a label each in one file: it has no split of its own."""
    entries = [{"t": row["text"], "s": row["label"]} for name in ("train", "test") for row in split(name)]
    (folder / "imdb").mkdir()
    (folder / "imdb" / "reviews.json").write_text(json.dumps(entries), encoding="utf-8")


def play(folder: Path, split: Split) -> None:
    """Writes a play that was cut into parts as the one text that it is."""
    parts = [row["text"] for name in ("train", "validation", "test") for row in split(name)]
    (folder / "tinyshakespeare.txt").write_text("".join(parts), encoding="utf-8")


REMOTES: dict[str, Remote] = {
    "mnist": Remote("ylecun/mnist", images(writers.write_mnist, mode="L")),
    "fashion-mnist": Remote("zalando-datasets/fashion_mnist", images(writers.write_fashion_mnist, mode="L")),
    "cifar10": Remote("uoft-cs/cifar10", images(writers.write_cifar10, column="img")),
    "cinic10": Remote("flwrlabs/cinic10", images(writers.write_cinic10)),
    "svhn": Remote("ufldl-stanford/svhn", images(writers.write_svhn), subset="cropped_digits"),
    "sst2": Remote("stanfordnlp/sst2", sentences),
    "imdb": Remote("stanfordnlp/imdb", reviews),
    "shakespeare": Remote("karpathy/tiny_shakespeare", play, revision="refs/convert/parquet"),
}


def fetch(name: str, root: Path, begin: Callable[[str], None] = lambda address: None) -> list[Path]:
    """Loads a data set from the Hub and writes it under ``root``; what was written.

    The files appear when all of them are written and read back, and with them a record of where they come from.
    """
    source = find_source(name)
    if name not in REMOTES:
        raise DataError(f"{name}: no place on the Hugging Face Hub is known; {_by_hand(name, root)}")
    if found := source.published.found(root):
        raise DataError(f"{name}: {found[0]} is there already; look at it with: incofl data verify {name}")
    remote = REMOTES[name]
    begin(remote.address)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
        folder = Path(scratch)
        remote.write(folder, functools.partial(_load, name, remote, root))
        source.load(folder)
        for entry in folder.iterdir():
            entry.replace(root / entry.name)
    written = source.published.found(root)
    sums = {path.name: file_md5(path) for path in written if path.is_file()}
    record_path(name, root).write_text(json.dumps({"source": remote.address, "md5": sums}, indent=2) + "\n")
    return written


def _load(name: str, remote: Remote, root: Path, split: str) -> Rows:
    try:
        return remote.rows(split)
    except ModuleNotFoundError:
        raise DataError(
            f"{name}: the package datasets is not installed; pip install 'incofl[hub]', or {_by_hand(name, root)}"
        ) from None
    except Exception as problem:  # whatever a network can do
        reason = str(problem).partition("\n")[0]
        raise DataError(
            f"{name}: {remote.address} cannot be loaded ({reason}); try again, or {_by_hand(name, root)}"
        ) from None


def _by_hand(name: str, root: Path) -> str:
    return f"put the original files there by hand: {root / next(iter(find_source(name).published.files), '')}"


def _examples(rows: Rows, column: str, mode: str) -> Examples:
    """Some images of CINIC-10 are grey: ``mode`` makes all of them alike."""
    pixels, labels = [], []
    for row in rows:
        pixels.append(np.asarray(row[column].convert(mode)))
        labels.append(row["label"])
    x = torch.from_numpy(np.stack(pixels))
    return Examples((x.unsqueeze(1) if mode == "L" else x.permute(0, 3, 1, 2)).contiguous(), torch.tensor(labels))
