"""Readers of text data sets: Shakespeare character by character, sentiment (SST-2 and IMDb) word by word."""

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from incofl.data.cache import Pair
from incofl.data.dataset import Examples, explained
from incofl.data.source import Source
from incofl.errors import DataError

Rows = Iterable[tuple[str, int]]  # texts and their classes, if they have any

TEST_SHARE = 5  # the last fifth of a role's windows
LEAST_WINDOWS = 2  # to train on: a batch of a single example is never used
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII
_SPEECH = re.compile(r"([^\n:]+):(?:\n(.*))?", re.DOTALL)

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


def shakespeare(source: Source, path: Path) -> Pair:
    """Reads a play as plain text."""
    return windows_of_roles(source, [(_read(path), 0)], [])


def windows_of_roles(source: Source, *parts: Rows) -> Pair:
    """Cuts what each role says into windows, where the next character is the class; roles with enough are groups."""
    length, text = source.shape[0], "".join(text for part in parts for text, _ in part)
    roles: list[tuple[Tensor, ...]] = []  # inputs, targets and role of each window, and whether it is tested on
    for tokens in map(encode, speeches(text).values()):
        count = (len(tokens) - 1) // length
        kept = count - count // TEST_SHARE
        if kept >= LEAST_WINDOWS:
            x, y = (torch.from_numpy(tokens[at : at + count * length]).view(count, length) for at in (0, 1))
            roles.append((x, y, torch.full((count,), len(roles)), torch.arange(count) >= kept))
    if not any(tested.any() for *_, tested in roles):
        least = TEST_SHARE * length + 1
        raise ValueError(f"{len(text)} characters, expected a role with {least} or more; the file is truncated")
    x, y, groups, tested = map(torch.cat, zip(*roles, strict=True))
    return Examples(x, y, groups).pick(~tested), Examples(x, y, groups).pick(tested)


def speeches(text: str) -> dict[str, str]:
    """Joins the speeches of each role; they are blocks between empty lines, with the role and a colon in line 1."""
    said: dict[str, list[str]] = {}
    text = text.replace("\r\n", "\n")
    for block in text.split("\n\n"):
        match = _SPEECH.fullmatch(block.strip("\n"))
        if match is not None:
            said.setdefault(match[1], []).append(match[2] or "")
        elif block.strip():
            line, first = text[: text.index(block)].count("\n") + 1, block.strip("\n").partition("\n")[0][:40]
            raise ValueError(f"got {first!r} near line {line}, expected a role and a colon, then its speech")
    return {role: "\n".join(parts) for role, parts in said.items()}


def encode(text: str) -> np.ndarray:
    """Turns characters into tokens of one byte: their places in ``CHARACTERS``, from 1 on; 0 is any other."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return np.where((points >= 32) & (points < 127), points - 30, points == 10).astype(np.uint8)


def decode(tokens: Tensor) -> str:
    """Turns tokens into characters, and the token of unknown characters into a replacement sign."""
    return "".join(("\N{REPLACEMENT CHARACTER}" + CHARACTERS)[token] for token in tokens.tolist())


def sst2(source: Source, path: Path) -> Pair:
    """Reads ``train.tsv`` for training and ``test.tsv`` for testing, or ``dev.tsv`` where that has no labels (GLUE)."""
    train, test, dev = (path.with_name(f"{split}.tsv") for split in ("train", "test", "dev"))
    labelled = test.is_file() and "label" in _read(test).partition("\n")[0].split("\t")
    return word_examples(source, _tsv(train), _tsv(test if labelled else dev))


def _tsv(path: Path) -> Rows:
    """Reads a header, then lines of a sentence, a tab and a label."""
    # Not splitlines: sentences may hold other characters that Python takes for line ends.
    header, *lines = _read(path).removesuffix("\n").split("\n")
    if header != "sentence\tlabel" or not lines:
        raise DataError(f"{path}: got {header[:60]!r}, expected 'sentence', a tab, 'label', and sentences below")
    rows = [line.rpartition("\t") for line in lines]
    for number, (text, tab, label) in enumerate(rows, start=2):
        if not tab or label not in ("0", "1"):
            line = (text + tab + label)[:60]
            raise DataError(f"{path}: line {number} is {line!r}, expected a sentence, a tab and 0 or 1; it is damaged")
    return [(text, int(label)) for text, _, label in rows]


def imdb(source: Source, path: Path) -> Pair:
    """Reads ``reviews.json``, a list of ``{"t": text, "s": 0 or 1}`` without a division into training and test."""
    with explained(f'{path}: not a readable JSON list of {{"t": text, "s": 0 or 1}}'):
        entries = json.loads(_read(path))
        for number, entry in enumerate(entries):
            text, label = (entry.get("t"), entry.get("s")) if isinstance(entry, dict) else (None, None)
            if not isinstance(text, str) or isinstance(label, bool) or label not in (0, 1):
                raise ValueError(f"entry {number} is {str(entry)[:60]!r}")
    return halves_of_reviews(source, [(entry["t"], int(entry["s"])) for entry in entries], [])


def halves_of_reviews(source: Source, *parts: Rows) -> Pair:
    """Makes a fixed half of each class the test set; a review that occurs more than once counts once."""
    label_of: dict[str, int] = {}
    for text, label in itertools.chain(*parts):
        label_of.setdefault(text, label)
    unique = [(text.replace("<br />", " "), label) for text, label in label_of.items()]
    labels = np.array(list(label_of.values()))
    order = np.random.default_rng(0).permutation(len(unique))
    by_class = [order[labels[order] == label] for label in (0, 1)]
    tested = np.sort(np.concatenate([members[: len(members) // 2] for members in by_class]))
    if not len(tested):
        raise ValueError(f"{len(unique)} reviews, expected two or more of a class; the file is truncated")
    trained = np.setdiff1d(order, tested)
    return word_examples(source, [unique[at] for at in trained], [unique[at] for at in tested])


def word_examples(source: Source, *parts: Rows) -> Pair:
    """Turns texts into tokens of lower-case words and punctuation, the most frequent ones of the training texts."""
    # Equal words are one object, so that the words of many texts fit into memory.
    train, test = ([([*map(sys.intern, _WORD.findall(text.lower()))], label) for text, label in part] for part in parts)
    counts = Counter(word for words, _ in train for word in words)
    known = sorted(counts, key=lambda word: (-counts[word], word))[: source.vocabulary - 2]  # tokens fit into 16 bits
    token_of = {word: token for token, word in enumerate(known, start=2)}

    def examples(part: list[tuple[list[str], int]]) -> Examples:
        tokens = np.full((len(part), *source.shape), PADDING, dtype=np.int16)
        for row, (words, _) in zip(tokens, part, strict=True):
            row[: len(words)] = [token_of.get(word, UNKNOWN) for word in words[: len(row)]]
        return Examples(torch.from_numpy(tokens), torch.tensor([label for _, label in part]))

    return examples(train), examples(test)


def _read(path: Path) -> str:
    with explained(f"{path}: not a readable text in UTF-8"):
        return path.read_text(encoding="utf-8")
