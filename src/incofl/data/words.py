"""Sentiment of texts, word by word: SST-2 and IMDb, with a small tokenizer that learns from the training texts."""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from incofl.data.dataset import Examples
from incofl.errors import DataError

PADDING, UNKNOWN = 0, 1
VOCABULARY = 8_192  # with these two; tokens fit into 16 bits
SST2_LENGTH, IMDB_LENGTH = 64, 256

_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
Labelled = tuple[list[str], list[int]]


def sst2(root: Path) -> tuple[Examples, Examples]:
    """``train.tsv`` to train on; to test on ``test.tsv``, or ``dev.tsv`` where that has no labels, as in GLUE."""
    folder = root / "sst2"
    train = _tsv(folder / "train.tsv")
    test = folder / "test.tsv"
    labelled = test.is_file() and "label" in _lines(test)[0].split("\t")
    return _examples(train, _tsv(test if labelled else folder / "dev.tsv"), SST2_LENGTH)


def imdb(root: Path) -> tuple[Examples, Examples]:
    """``reviews.json``, which has no split of its own: a fixed half of the reviews of each class is the test set.

    A review that is there more than once counts once, so that none is both trained and tested on.
    """
    path = root / "imdb" / "reviews.json"
    _check_file(path)
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as problem:  # no JSON, or no UTF-8
        raise DataError(f"{path}: damaged or truncated JSON ({problem}); fetch it again") from None
    if not isinstance(entries, list):
        raise DataError(f'{path}: got a JSON {type(entries).__name__}, expected a list of {{"t": text, "s": 0 or 1}}')
    reviews: dict[str, int] = {}
    for number, entry in enumerate(entries):
        text, label = (entry.get("t"), entry.get("s")) if isinstance(entry, dict) else (None, None)
        if not isinstance(text, str) or isinstance(label, bool) or label not in (0, 1):
            raise DataError(
                f'{path}: entry {number} is {str(entry)[:60]!r}, expected {{"t": text, "s": 0 or 1}}; fetch it again'
            )
        reviews.setdefault(text, label)
    order = np.random.default_rng(0).permutation(len(reviews))
    texts, labels = list(reviews), np.array(list(reviews.values()), dtype=np.int64)
    tested = np.zeros(len(texts), dtype=bool)
    for label in (0, 1):
        members = order[labels[order] == label]
        tested[members[: len(members) // 2]] = True

    def half(chosen: np.ndarray) -> Labelled:
        return [texts[i].replace("<br />", " ") for i in np.flatnonzero(chosen)], labels[chosen].tolist()

    if not tested.any():
        raise DataError(f"{path}: {len(texts)} reviews, expected two or more of a class; the file is truncated")
    return _examples(half(~tested), half(tested), IMDB_LENGTH)


def _tsv(path: Path) -> Labelled:
    """Lines of a sentence and a label between which is a tab, after a header that says so."""
    header, *lines = _lines(path)
    columns = header.split("\t")
    if columns != ["sentence", "label"]:
        raise DataError(f"{path}: got the columns {columns}, expected ['sentence', 'label'] in the first line")
    texts, labels = [], []
    for number, line in enumerate(lines, start=2):
        text, tab, label = line.rpartition("\t")
        if not tab or label not in ("0", "1"):
            raise DataError(
                f"{path}: line {number} is {line[:60]!r}, expected a sentence, a tab and 0 or 1; "
                "the file is truncated or damaged"
            )
        texts.append(text)
        labels.append(int(label))
    if not texts:
        raise DataError(f"{path}: no sentences, expected some after the header; the file is truncated")
    return texts, labels


def _lines(path: Path) -> list[str]:
    _check_file(path)
    try:
        # Not splitlines: sentences may hold other characters that Python takes for line ends.
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: not a text in UTF-8 ({problem.reason} at byte {problem.start})") from None


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(
            f"{path.parent.name}: missing {path.absolute()}; set data.root to the folder that holds {path.parent.name}/"
        )


def _examples(train: Labelled, test: Labelled, length: int) -> tuple[Examples, Examples]:
    trained, tested = tokenize(train[0], test[0], length)
    return Examples(trained, torch.tensor(train[1])), Examples(tested, torch.tensor(test[1]))


def tokenize(train: Sequence[str], test: Sequence[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as tokens: lower case, words and punctuation, cut or padded to a length.

    The vocabulary is the most frequent words of the training texts, the first in the alphabet of equally frequent ones.
    """
    # Every word gets a number when it is first seen, so that a text is read once; the numbers become tokens at the end.
    number_of: defaultdict[str, int] = defaultdict(itertools.count().__next__)

    def read(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.fromiter(map(number_of.__getitem__, _WORD.findall(text.lower())), dtype=np.int32) for text in texts]

    read_train, read_test = read(train), read(test)
    words = np.array(list(number_of), dtype=object)
    counts = np.bincount(np.concatenate(read_train), minlength=len(words))
    known = sorted(np.flatnonzero(counts), key=lambda number: (-counts[number], words[number]))[: VOCABULARY - 2]
    token_of = np.full(len(words), UNKNOWN, dtype=np.int16)
    token_of[known] = np.arange(2, 2 + len(known))

    def padded(texts: list[np.ndarray]) -> torch.Tensor:
        tokens = np.full((len(texts), length), PADDING, dtype=np.int16)
        for row, numbers in zip(tokens, texts, strict=True):
            row[: len(numbers)] = token_of[numbers[:length]]
        return torch.from_numpy(tokens)

    return padded(read_train), padded(read_test)
