"""How texts become tokens: by a list of words, or by a tokenizer of Hugging Face."""

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from incofl.errors import DataError

PADDING, UNKNOWN = 0, 1  # the tokens before those of words
TOKENIZER = "tokenizer_config.json"  # the file that a folder of a tokenizer of Hugging Face has
EXAMPLE = "a text file with a word in each line, or a folder or name on the Hub of a tokenizer of Hugging Face"
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """The words and punctuation marks of a text in lower case; equal words are one object, so that many texts fit."""
    return [*map(sys.intern, _WORD.findall(text.lower()))]


def most_frequent(texts: Iterable[Sequence[str]], count: int) -> list[str]:
    """The most frequent words of texts; of equally frequent ones, the first of the alphabet."""
    counts = Counter(word for words in texts for word in words)
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


@dataclass(frozen=True)
class Words:
    """Known words, from token 2 on; 0 is padding, 1 any other word."""

    known: Sequence[str]
    padding = PADDING
    masked = False  # whether a model gets a mask beside the tokens

    @functools.cached_property
    def _token_of(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.known, start=UNKNOWN + 1)}

    @property
    def size(self) -> int:
        return len(self.known) + UNKNOWN + 1

    def __call__(self, text: str | list[str], most: int | None = None) -> list[int]:
        words = text if isinstance(text, list) else words_of(text)
        return [self._token_of.get(word, UNKNOWN) for word in words[:most]]


@dataclass(frozen=True)
class Subwords:
    """A tokenizer of Hugging Face, with its special tokens."""

    tokenizer: Any
    masked = True

    @property
    def padding(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    @property
    def size(self) -> int:
        return len(self.tokenizer)

    def __call__(self, text: str, most: int | None = None) -> list[int]:
        cut = {} if most is None else {"truncation": True, "max_length": most}
        return list(self.tokenizer(text, verbose=False, **cut)["input_ids"])


Tokenizer = Words | Subwords


@functools.cache
def find_tokenizer(where: str) -> Tokenizer:
    """The words of a file, or the tokenizer of a folder or of the Hub."""
    path = Path(where).expanduser()
    if path.is_file():
        try:
            known = path.read_text(encoding="utf-8").split("\n")
        except ValueError:
            raise DataError(f"data.tokenizer: {where}: not a text in UTF-8, expected {EXAMPLE}") from None
        known = known[:-1] if known[-1] == "" else known
        if len(set(known)) < len(known) or not all(known):
            raise DataError(f"data.tokenizer: {where} has an empty line or a word twice, expected a word in each line")
        return Words(tuple(known))
    if not path.is_dir() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", where):
        raise DataError(f"data.tokenizer: got {where!r}, which is not there, expected {EXAMPLE}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(f"data.tokenizer: {where} needs transformers: pip install 'incofl[lora]'") from None
    try:
        never = {"trust_remote_code": False}  # no code that lies beside the words, and nobody is asked whether to
        return Subwords(AutoTokenizer.from_pretrained(str(path) if path.is_dir() else where, **never))
    except Exception as problem:  # of the network, the server, the name or the files: many types
        reason = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise DataError(f"data.tokenizer: {where} cannot be loaded ({reason}), expected {EXAMPLE}") from None
