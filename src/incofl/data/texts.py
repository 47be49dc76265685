"""Readers of text data sets: Shakespeare character by character, sentiment (SST-2 and IMDb) word by word."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incofl.data.cache import Pair
from incofl.data.dataset import Examples, explained
from incofl.data.source import Source
from incofl.data.tokenizers import Tokenizer, Words, find_tokenizer, most_frequent, words_of
from incofl.errors import DataError

Rows = Iterable[tuple[str, int]]  # texts and their classes, if they have any
Texts = tuple[Rows, Rows]  # for training and testing

TEST_SHARE = 5  # the last fifth of a role's windows
LEAST_WINDOWS = 2  # to train on: a batch of a single example is never used
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII
_SPEECH = re.compile(r"([^\n:]+):(?:\n(.*))?", re.DOTALL)


def shakespeare(source: Source, path: Path) -> Pair:
    """Reads a play as plain text."""
    return windows_of_roles(source, [(_read(path), 0)], [])


def windows_of_roles(source: Source, *parts: Rows) -> Pair:
    """Cuts what each role says into windows, where the next character is the class; roles with enough are groups."""
    length, text = source.shape[0], "".join(text for part in parts for text, _ in part)
    roles: list[tuple[Tensor, ...]] = []  # inputs, targets and role of each window, and whether it is tested on
    for tokens in map(encode, speeches(text).values()):
        x, y = windows(tokens, length)
        count = len(x)
        kept = count - count // TEST_SHARE
        if kept >= LEAST_WINDOWS:
            roles.append((x, y, torch.full((count,), len(roles)), torch.arange(count) >= kept))
    if not any(tested.any() for *_, tested in roles):
        least = TEST_SHARE * length + 1
        raise ValueError(f"{len(text)} characters, expected a role with {least} or more; the file is truncated")
    x, y, groups, tested = map(torch.cat, zip(*roles, strict=True))
    return Examples(x, y, groups).pick(~tested), Examples(x, y, groups).pick(tested)


def windows(tokens: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """All whole windows of a text, one after the other, and for each position the token that follows."""
    count = max(len(tokens) - 1, 0) // length
    x, y = (torch.from_numpy(tokens[at : at + count * length]).view(count, length) for at in (0, 1))
    return x, y


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
    """Reads the files of SST-2."""
    return word_examples(source, *sst2_texts(path))


def sst2_texts(path: Path) -> Texts:
    """Reads ``train.tsv`` for training and ``test.tsv`` for testing, or ``dev.tsv`` where that has no labels (GLUE)."""
    train, test, dev = (path.with_name(f"{split}.tsv") for split in ("train", "test", "dev"))
    labelled = test.is_file() and "label" in _read(test).partition("\n")[0].split("\t")
    return _tsv(train), _tsv(test if labelled else dev)


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
    """Reads the file of IMDb."""
    return word_examples(source, *imdb_texts(path))


def imdb_texts(path: Path) -> Texts:
    """Reads ``reviews.json``, a list of ``{"t": text, "s": 0 or 1}`` without a division into training and test."""
    with explained(f'{path}: not a readable JSON list of {{"t": text, "s": 0 or 1}}'):
        entries = json.loads(_read(path))
        for number, entry in enumerate(entries):
            text, label = (entry.get("t"), entry.get("s")) if isinstance(entry, dict) else (None, None)
            if not isinstance(text, str) or isinstance(label, bool) or label not in (0, 1):
                raise ValueError(f"entry {number} is {str(entry)[:60]!r}")
    return halves((entry["t"], int(entry["s"])) for entry in entries)


def halves_of_reviews(source: Source, *parts: Rows) -> Pair:
    """The examples of reviews, of which a fixed half is the test set."""
    return word_examples(source, *halves(itertools.chain(*parts)))


def halves(reviews: Rows) -> Texts:
    """Makes a fixed half of each class the test set; a review that occurs more than once counts once."""
    label_of: dict[str, int] = {}
    for text, label in reviews:
        label_of.setdefault(text, label)
    unique = [(text.replace("<br />", " "), label) for text, label in label_of.items()]
    labels = np.array(list(label_of.values()))
    order = np.random.default_rng(0).permutation(len(unique))
    by_class = [order[labels[order] == label] for label in (0, 1)]
    tested = np.sort(np.concatenate([members[: len(members) // 2] for members in by_class]))
    if not len(tested):
        raise ValueError(f"{len(unique)} reviews, expected two or more of a class; the file is truncated")
    trained = np.setdiff1d(order, tested)
    return [unique[at] for at in trained], [unique[at] for at in tested]


TEXTS = {"sst2": sst2_texts, "imdb": imdb_texts}  # data sets whose texts have words


def list_words(source: Source, root: Path, count: int) -> list[str]:
    """The most frequent words of the training texts of a data set."""
    if source.name not in TEXTS:
        raise DataError(f"{source.name}: has no words, expected one of {', '.join(TEXTS)}")
    with explained(f"{source.name}: not readable"):
        train, _ = TEXTS[source.name](source.original(root))
    return most_frequent((words_of(text) for text, _ in train), count)


def word_examples(source: Source, *parts: Rows) -> Pair:
    """Turns texts into tokens: those of the data set's tokenizer, or the most frequent words of the training texts."""
    train, test = (list[tuple[Any, int]](part) for part in parts)
    if source.tokenizer:
        tokenizer = find_tokenizer(source.tokenizer)
    else:
        train, test = ([(words_of(text), label) for text, label in part] for part in (train, test))
        tokenizer = Words(most_frequent((words for words, _ in train), source.vocabulary - 2))
    make = _next_tokens if source.sequence else _classified
    return make(train, tokenizer, source.shape[0]), make(test, tokenizer, source.shape[0])


def _classified(rows: Sequence[tuple[Any, int]], tokenizer: Tokenizer, length: int) -> Examples:
    """The beginnings of texts, padded, with their classes; with a mask where the tokenizer is made for one."""
    tokens: np.ndarray = np.full((len(rows), length), tokenizer.padding, dtype=_dtype(tokenizer))
    mask = np.zeros((len(rows), length), dtype=np.uint8)
    for row, held, (text, _) in zip(tokens, mask, rows, strict=True):
        found = tokenizer(text, length)
        row[: len(found)], held[: len(found)] = found, 1
    x, labels = torch.from_numpy(tokens), torch.tensor([label for _, label in rows])
    return Examples({"input_ids": x, "attention_mask": torch.from_numpy(mask)} if tokenizer.masked else x, labels)


def _next_tokens(rows: Sequence[tuple[Any, int]], tokenizer: Tokenizer, length: int) -> Examples:
    """All whole windows of texts, where at each position the class is the token that follows."""
    found = [windows(np.array(tokenizer(text), dtype=_dtype(tokenizer)), length) for text, _ in rows]
    x, y = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    if not len(x):
        raise ValueError(f"no text has more than {length} tokens, expected some: set a smaller data.length")
    return Examples(x, y)


def _dtype(tokenizer: Tokenizer) -> type:
    return np.int16 if tokenizer.size < 2**15 else np.int32


def _read(path: Path) -> str:
    with explained(f"{path}: not a readable text in UTF-8"):
        return path.read_text(encoding="utf-8")
