"""Shakespeare, character by character: every speaking role writes for itself.

The file is a play as a plain text: blocks between empty lines, the first line of each the role and a colon, the rest
its speech. All speeches of a role are joined in their order and cut into windows; at each position of a window the
class is the character that follows.
"""

import re
from pathlib import Path

import numpy as np
import torch

from incofl.data.dataset import Examples
from incofl.errors import DataError

WINDOW = 80
TEST_SHARE = 5  # the last fifth of a role's windows
LEAST_WINDOWS = 2  # to train on: a batch of a single example is never used
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII
VOCABULARY = 1 + len(CHARACTERS)  # 0: any other character

_FILES = ("tinyshakespeare.txt", "shakespeare.txt", "shakespeare/input.txt")
_SPEECH = re.compile(r"([^\n:]+):(?:\n(.*))?", re.DOTALL)
_TOKEN_OF = np.zeros(128, dtype=np.uint8)
_TOKEN_OF[[ord(character) for character in CHARACTERS]] = np.arange(1, VOCABULARY)


def shakespeare(root: Path) -> tuple[Examples, Examples]:
    """A group for each role with enough text, in the order of their first words."""
    path = next((root / name for name in _FILES if (root / name).is_file()), None)
    if path is None:
        raise DataError(
            f"shakespeare: nothing found in {root.absolute()}; expected {', '.join(_FILES[:-1])} or {_FILES[-1]}; "
            "set data.root to the folder that holds it"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: not a text in UTF-8 ({problem.reason} at byte {problem.start})") from None
    train, test = [], []
    for tokens in (encode(speech) for speech in speeches(text, path).values()):
        count = (len(tokens) - 1) // WINDOW
        if count - count // TEST_SHARE >= LEAST_WINDOWS:
            x = tokens[: count * WINDOW].reshape(count, WINDOW)
            y = tokens[1 : count * WINDOW + 1].reshape(count, WINDOW)
            kept = count - count // TEST_SHARE
            train.append((x[:kept], y[:kept]))
            test.append((x[kept:], y[kept:]))
    if not any(len(x) for x, _ in test):
        raise DataError(
            f"{path}: {len(text)} characters, expected a role with {TEST_SHARE * WINDOW + 1} or more; "
            "the file is truncated or of another kind"
        )
    return _examples(train), _examples(test)


def speeches(text: str, path: Path) -> dict[str, str]:
    """All that each role says, its speeches joined by line ends."""
    said: dict[str, list[str]] = {}
    line = 1
    for block in text.replace("\r\n", "\n").split("\n\n"):
        if block.strip():
            match = _SPEECH.fullmatch(block.strip("\n"))
            if match is None:
                first = block.strip("\n").partition("\n")[0]
                raise DataError(
                    f"{path}: got {first[:40]!r} near line {line}, expected a role and a colon, then its speech, "
                    "and an empty line between speeches"
                )
            said.setdefault(match[1], []).append(match[2] or "")
        line += block.count("\n") + 2
    return {role: "\n".join(parts) for role, parts in said.items()}


def encode(text: str) -> np.ndarray:
    """Characters as tokens of one byte."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return _TOKEN_OF[np.where(points < 128, points, 0)]


def decode(tokens: torch.Tensor) -> str:
    """Tokens as characters; those that the vocabulary lacks as a replacement sign."""
    return "".join(("\N{REPLACEMENT CHARACTER}" + CHARACTERS)[token] for token in tokens.tolist())


def _examples(roles: list[tuple[np.ndarray, np.ndarray]]) -> Examples:
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*roles, strict=True))
    sizes = torch.tensor([len(windows) for windows, _ in roles])
    return Examples(x, y, torch.arange(len(roles)).repeat_interleave(sizes))
