"""Data: examples as tensors, how they reach a model, and who made them."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import default_collate

from incofl.errors import DataError, IncoflError
from incofl.task import UNSEEN
from incofl.tensors import Inputs, map_inputs, num_examples

EXPECTED = "expected numbers of one shape: tokenise, pad or resize them first, or leave them out"
TARGETS = ("label", "labels", "target", "targets", "y")  # columns of named data that hold the targets


@contextmanager
def explained(what: str, hint: str = "fetch it again") -> Iterator[None]:
    """Makes one line of any exception: a damaged file, a network or an object of yours can raise nearly anything."""
    try:
        yield
    except IncoflError:
        raise
    except Exception as problem:
        reason = getattr(problem, "strerror", None) or str(problem).partition("\n")[0]
        raise DataError(f"{what} ({reason}); {hint}") from None


@dataclass(frozen=True)
class Examples:
    """Examples with their targets; the first dimension of every tensor counts examples."""

    x: Any  # what the model is called with: a tensor, a tuple or a dict of tensors
    y: Tensor  # the targets, of any shape: a class or a number per example, one per position, or several
    groups: Tensor | None = None  # for each example the number of the person or device that made it, if known

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> Any:
        """The shape of one example; of a tuple or dict of inputs, that of each."""
        return map_inputs(lambda tensor: tuple(tensor.shape[1:]), self.x)

    def pick(self, indices: Tensor | slice) -> "Examples":
        """Some of the examples."""
        groups = None if self.groups is None else self.groups[indices]
        return Examples(map_inputs(lambda tensor: tensor[indices], self.x), self.y[indices], groups)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of inputs and targets by names of their own."""
        x = self.x
        named = x.items() if isinstance(x, dict) else enumerate(x if isinstance(x, tuple) else [x])
        return {f"x.{name}": value for name, value in named} | {"y": self.y}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Examples":
        """Examples of the same structure with other tensors, named as ``tensors`` does."""
        inputs = iter([tensors[name] for name in self.tensors() if name != "y"])
        return Examples(map_inputs(lambda _: next(inputs), self.x), tensors["y"])


@dataclass(frozen=True)
class Pipeline:
    """How stored examples become a model's input: bytes become numbers from 0 to 1, other numbers stay as they are."""

    def test(self, x: Any) -> Any:
        """A batch as it is evaluated, in torch's default type."""
        return map_inputs(_as_number, x)

    @property
    def formula(self) -> str:
        """What ``test`` does to stored examples, for whoever prepares inputs without this library."""
        return f"`{self!r}.test(examples)`" if type(self) is not Pipeline else "as they are, bytes divided by 255"

    @property
    def draws(self) -> bool:
        """Whether ``train`` draws random numbers; if not, it is ``test``, example by example."""
        return type(self).train is not Pipeline.train

    def train(self, x: Any, generator: Generator) -> Any:
        """A batch for training, augmented by random numbers of its own."""
        return self.test(x)


def _as_number(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.get_default_dtype()).div_(255)
    if tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor if tensor.dtype == torch.bool else tensor.long()


def _one_hot(y: Tensor) -> bool:
    """Whether whole-number targets are rows with a single 1."""
    rows = y.dim() == 2 and y.shape[1] > 1 and len(y) > 1 and not y.is_floating_point()
    return rows and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


@dataclass(frozen=True)
class Data:
    """Your own data, or a data set of the table in memory.

    Examples are a pair ``(inputs, targets)`` of tensors or arrays, where inputs may be a tuple or a dict of them; a
    torch ``Dataset`` of such pairs; a ``DataLoader`` of batches of them; or a Hugging Face dataset with a column
    ``label``, ``labels``, ``target``, ``targets`` or ``y`` and others that are inputs. ``clients`` is a list of index
    arrays, one group label per example, or the name of a column of a Hugging Face dataset that holds the labels.
    """

    train: Any  # the training examples
    test: Any = None  # the test examples; without them, nothing is evaluated
    _: KW_ONLY
    classes: int | None = None  # number of classes; left out, one more than the largest whole-number target
    clients: Any = None  # who holds which examples; left out, the config's partition divides them
    pipeline: Pipeline = field(default_factory=Pipeline)  # how examples reach the model
    name: str = "own"  # what it is called in records
    vocabulary: int = 0  # number of tokens, for texts; 0: not a text
    sequence: bool = False  # whether every position of a text has a target of its own

    def __post_init__(self) -> None:
        classes, clients = self.classes, self.clients
        column = clients if isinstance(clients, str) else None
        if column is not None:
            if column not in getattr(self.train, "column_names", ()):
                raise DataError(f"clients: got {column!r}, expected a column of a Hugging Face dataset")
            clients = list(self.train[column])
        train = as_examples(self.train, "train", ignored=column)
        test = train.pick(slice(0, 0)) if self.test is None else as_examples(self.test, "test", ignored=column)
        if clients is not None:
            train, clients = _natural_clients(train, clients)
            test = Examples(test.x, test.y)  # groups of it would be numbered differently
        if classes is None and len(train) and not train.y.is_floating_point():
            classes = int(train.y.max()) + 1
        if test.shape != train.shape:
            raise DataError(f"test: got examples of shape {test.shape}, expected {train.shape} as in train")
        for what, y in (("train", train.y), ("test", test.y)):
            if not self.sequence and _one_hot(y):
                raise DataError(f"{what}: targets are rows with a single 1, expected class numbers; use y.argmax(1)")
            if classes is not None and len(y) and not y.is_floating_point() and int(y.max()) >= classes:
                raise DataError(f"{what}: a target is {int(y.max())}, expected classes below {classes}")
        vars(self).update(train=train, test=test, classes=classes, clients=clients)  # it is frozen from here on

    @property
    def natural_clients(self) -> int | None:
        """Number of clients that the data come with; ``None`` if the config's partition divides them."""
        if self.clients is not None:
            return len(self.clients)
        return None if self.train.groups is None else len(self.train.groups.unique())

    @cached_property
    def unseen_clients(self) -> Tensor | None:
        """The groups of which there are test examples and no training examples; ``None``: none, or no others."""
        if self.train.groups is None or self.test.groups is None:
            return None
        found = self.test.groups.unique()
        unseen = found[~torch.isin(found, self.train.groups)]
        return unseen if 0 < len(unseen) < len(found) else None

    def seen_and_unseen(self, test: Examples) -> dict[str, Examples]:
        """Test examples of clients by an empty name, and those of unseen clients by what is put behind a metric's."""
        if self.unseen_clients is None or test.groups is None:
            return {"": test}
        unseen = torch.isin(test.groups, self.unseen_clients)
        return {"": test.pick(~unseen), UNSEEN: test.pick(unseen)}

    def halves(self, test: Examples) -> tuple[Examples, Examples]:
        """Test examples in two halves: by their people or devices if these are known, else every other one."""
        groups = test.groups
        by_group = groups is not None and 0 < int((groups % 2).sum()) < len(groups)
        odd = (groups if by_group and groups is not None else torch.arange(len(test))) % 2 == 1
        return test.pick(~odd), test.pick(odd)

    @property
    def inputs(self) -> Inputs:
        """One example as the model gets it, without values, on the meta device."""
        stored = map_inputs(lambda tensor: torch.zeros(1, *tensor.shape[1:], dtype=tensor.dtype), self.train.x)
        return map_inputs(lambda tensor: tensor[0].to("meta"), self.pipeline.test(stored))

    def fingerprint(self) -> str:
        """A digest of the training data, so that a run is never resumed on other data."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self.train.tensors().values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def as_examples(given: Any, what: str, ignored: str | None = None) -> Examples:
    """Examples from any of the forms that ``Data`` takes; the column ``ignored`` is not an input."""
    if isinstance(given, Examples):
        return given
    if hasattr(given, "with_format"):  # a Hugging Face dataset
        given = given.with_format("torch")[:]
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, tuple | list | Mapping):
        items = [given[at] for at in range(len(given))]
        with explained(f"{what}: cannot be stacked", EXPECTED):
            given = default_collate(items)
    elif hasattr(given, "__iter__") and not isinstance(given, tuple | list | Mapping):  # batches of a DataLoader
        parts = [as_examples(batch, what) for batch in given]
        if not parts:
            raise DataError(f"{what}: got no batches, expected some")
        tensors = [part.tensors() for part in parts]
        return parts[0].with_tensors({name: torch.cat([each[name] for each in tensors]) for name in tensors[0]})
    if isinstance(given, Mapping):
        columns = {name: values for name, values in given.items() if name != ignored}
        target = next((name for name in TARGETS if name in columns), None)
        if target is None or len(columns) < 2:
            expected = f"one of {', '.join(TARGETS)} for the targets, and inputs"
            raise DataError(f"{what}: got the columns {list(columns)}, expected {expected}")
        targets = columns.pop(target)
        given = (columns if len(columns) > 1 else columns.popitem()[1]), targets
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f"{what}: got {type(given).__name__}, expected a pair (inputs, targets)")
    inputs, targets = given
    raw = Examples({str(key): inputs[key] for key in inputs} if isinstance(inputs, Mapping) else inputs, targets)
    found = raw.with_tensors({name: _as_tensor(value, f"{what} {name}") for name, value in raw.tensors().items()})
    if (count := num_examples(found.x)) != len(found):
        raise DataError(f"{what}: got {count} inputs and {len(found)} targets, expected as many of each")
    return found if found.y.is_floating_point() else Examples(found.x, found.y.long())


def _as_tensor(value: Any, what: str) -> Tensor:
    """A tensor of numbers from a tensor, an array or nested lists; float64 becomes torch's default type."""
    with explained(f"{what}: cannot become a tensor", EXPECTED):
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _natural_clients(train: Examples, clients: Any) -> tuple[Examples, list[Tensor] | None]:
    """Groups, if there is a label per example; else lists of indices."""
    given = clients.tolist() if isinstance(clients, Tensor | np.ndarray) else list(clients)
    if given and np.ndim(given[0]):
        every = np.concatenate([np.ravel(part) for part in given])
        if not np.isin(every, np.arange(len(train))).all():
            raise DataError(f"clients: an index is out of range, expected 0 to {len(train) - 1}")
        if len(np.unique(every)) < len(every):
            raise DataError("clients: an example has two clients, expected lists of indices that do not overlap")
        return train, [torch.from_numpy(np.ravel(part).astype(np.int64)) for part in given]
    if len(given) != len(train):
        raise DataError(f"clients: got {len(given)} labels, expected {len(train)}, one per training example")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(given))}
    return Examples(train.x, train.y, torch.tensor([numbers[label] for label in given])), None
