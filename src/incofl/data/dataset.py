"""Data: examples as tensors, how they reach a model, and who made them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from incofl.errors import DataError
from incofl.inputs import Inputs, map_inputs, num_examples

TARGETS = ("label", "labels", "target", "targets", "y")  # columns of named data that hold the targets


@dataclass(frozen=True)
class Examples:
    """Examples with their targets.

    Attributes:
        x: what the model is called with: a tensor, a tuple or a dict of tensors; the first dimension counts examples.
        y: the targets, of any shape: a class or a number per example, one per position, or several.
        groups: for each example the number of the person or device that made it, where that is known.
    """

    x: Any
    y: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def pick(self, indices: Tensor | slice) -> "Examples":
        """Some of the examples."""
        groups = None if self.groups is None else self.groups[indices]
        return Examples(map_inputs(lambda tensor: tensor[indices], self.x), self.y[indices], groups)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of inputs and targets by names of their own."""
        named = (
            self.x if isinstance(self.x, dict) else dict(enumerate(self.x if isinstance(self.x, tuple) else [self.x]))
        )
        return {f"x.{name}": value for name, value in named.items()} | {"y": self.y}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Examples":
        """Examples of the same structure with other tensors, named as ``tensors`` does."""
        inputs = iter([tensors[name] for name in self.tensors() if name != "y"])
        return Examples(map_inputs(lambda _: next(inputs), self.x), tensors["y"])


class Pipeline(Protocol):
    """How stored examples become a model's input, a batch at a time."""

    def test(self, x: Any) -> Any:
        """A batch as it is evaluated."""
        ...

    def train(self, x: Any, generator: Generator) -> Any:
        """A batch for training, augmented by random numbers of its own."""
        ...


@dataclass(frozen=True)
class AsStored:
    """Bytes become numbers from 0 to 1, other numbers stay what they are, in torch's default type."""

    def test(self, x: Inputs) -> Inputs:
        """A batch as it is evaluated."""
        return map_inputs(_as_number, x)

    def train(self, x: Inputs, generator: Generator) -> Inputs:
        """A batch for training."""
        return self.test(x)


def _as_number(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor.to(torch.get_default_dtype()).div_(255)
    if tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor if tensor.dtype == torch.bool else tensor.long()


@dataclass(frozen=True)
class Data:
    """Your own data, or a data set of the table in memory.

    Attributes:
        train: the training examples: a pair ``(inputs, targets)`` of tensors or arrays, where inputs may be a tuple or
            a dict of them; a map-style torch ``Dataset`` of such pairs; or a Hugging Face dataset with a column
            ``label`` (or ``labels``, ``target``, ``targets``, ``y``) and others that are the model's inputs.
        test: the test examples, in the same form; without them, nothing is evaluated.
        classes: number of classes; left out, one more than the largest whole-number target.
        clients: who holds which examples: a list of index arrays, or one group label per example (the name of a column
            of a Hugging Face dataset is as good); left out, the config's partition divides them.
        pipeline: how examples reach the model: normalisation, augmentation; left out, bytes become numbers from 0 to 1
            and all else stays as it is.
        name: what it is called in records.
        vocabulary: number of tokens, for texts; 0: not a text.
        sequence: whether every position of a text has a target of its own.
    """

    train: Any
    test: Any = None
    classes: int | None = field(default=None, kw_only=True)
    clients: Any = field(default=None, kw_only=True)
    pipeline: Pipeline = field(default_factory=AsStored, kw_only=True)
    name: str = field(default="own", kw_only=True)
    vocabulary: int = field(default=0, kw_only=True)
    sequence: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        clients = self.clients
        if isinstance(clients, str):
            train, clients = _without_column(self.train, clients)
            object.__setattr__(self, "train", train)
            object.__setattr__(self, "test", None if self.test is None else _without_column(self.test, self.clients)[0])
        train = as_examples(self.train, "train")
        test = train.pick(slice(0, 0)) if self.test is None else as_examples(self.test, "test")
        if clients is not None:
            train, clients = _natural_clients(train, clients)
        if self.classes is None and not train.y.is_floating_point() and len(train):
            object.__setattr__(self, "classes", int(train.y.max()) + 1)
        for what, part in (("train", train), ("test", test)):
            _check_structure(what, part, train)
            known = self.classes is not None and len(part) and not part.y.is_floating_point()
            if known and int(part.y.max()) >= (self.classes or 0):
                raise DataError(f"{what}: a target is {int(part.y.max())}, expected classes below {self.classes}")
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "test", test)
        object.__setattr__(self, "clients", clients)

    @property
    def shape(self) -> Any:
        """The shape of one example as the model gets it; of a tuple or dict of inputs, that of each."""
        shapes = {name: tuple(value.shape[1:]) for name, value in self.train.tensors().items() if name != "y"}
        if isinstance(self.train.x, Tensor):
            return shapes["x.0"]
        return {name.removeprefix("x."): shape for name, shape in shapes.items()}

    @property
    def natural_clients(self) -> int | None:
        """Number of clients that the data come with; ``None`` if the config's partition divides them."""
        if self.clients is not None:
            return len(self.clients)
        return None if self.train.groups is None else len(self.train.groups.unique())

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


def as_examples(given: Any, what: str) -> Examples:
    """Examples from any of the forms that ``Data`` takes."""
    if isinstance(given, Examples):
        return given
    if hasattr(given, "column_names") and hasattr(given, "with_format"):  # a Hugging Face dataset
        given = _from_columns({name: _column(given, name, what) for name in given.column_names}, what)
    elif not isinstance(given, tuple | list) and hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        given = _collated([given[at] for at in range(len(given))], what)
    elif isinstance(given, Iterator) or (not isinstance(given, tuple | list) and hasattr(given, "__iter__")):
        given = _joined(list(given), what)  # batches, such as those of a DataLoader
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f"{what}: got {type(given).__name__}, expected a pair (inputs, targets)")
    inputs, targets = given
    if isinstance(inputs, Mapping):
        x: Inputs = {str(name): as_tensor(value, f"{what} input {name!r}") for name, value in inputs.items()}
    elif isinstance(inputs, tuple):
        x = tuple(as_tensor(value, f"{what} input {at}") for at, value in enumerate(inputs))
    else:
        x = as_tensor(inputs, f"{what} inputs")
    y = as_tensor(targets, f"{what} targets")
    if num_examples(x) != len(y):
        raise DataError(f"{what}: got {num_examples(x)} inputs and {len(y)} targets, expected as many of each")
    return Examples(x, y if y.is_floating_point() else y.long())


def as_tensor(value: Any, what: str) -> Tensor:
    """A tensor of numbers from a tensor, an array or nested lists; float64 becomes torch's default type."""
    try:
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError, RuntimeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise DataError(
            f"{what}: cannot become one tensor ({reason}); expected numbers of one shape: pad or resize them first"
        ) from None
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _collated(items: list[Any], what: str) -> Any:
    try:
        return torch.utils.data.default_collate(items)
    except (TypeError, RuntimeError) as problem:
        reason = str(problem).partition("\n")[0]
        raise DataError(
            f"{what}: its items cannot be stacked ({reason}); expected pairs (inputs, target) of tensors of one shape"
        ) from None


def _joined(batches: list[Any], what: str) -> Any:
    parts = [as_examples(batch, what) for batch in batches]
    if not parts:
        raise DataError(f"{what}: got no batches, expected some")
    tensors = [part.tensors() for part in parts]
    joined = parts[0].with_tensors({name: torch.cat([t[name] for t in tensors]) for name in tensors[0]})
    return joined.x, joined.y


def _column(dataset: Any, name: str, what: str) -> Any:
    values = dataset.with_format("torch")[name]
    try:
        values = values[:]
        return values if isinstance(values, Tensor) else torch.stack(list(values))
    except (TypeError, RuntimeError):
        raise DataError(
            f"{what}: column {name!r} cannot become one tensor; expected numbers of one shape: tokenise, pad or resize "
            "them first, or drop it with remove_columns"
        ) from None


def _from_columns(columns: dict[str, Any], what: str) -> tuple[Any, Any]:
    target = next((name for name in TARGETS if name in columns), None)
    if target is None:
        raise DataError(
            f"{what}: got the columns {list(columns)}, expected one of {', '.join(TARGETS)} for the targets"
        )
    inputs = {name: value for name, value in columns.items() if name != target}
    return (inputs if len(inputs) > 1 else next(iter(inputs.values()))), columns[target]


def _without_column(dataset: Any, name: str) -> tuple[Any, Any]:
    if name not in getattr(dataset, "column_names", ()):
        raise DataError(f"clients: got {name!r}, expected a column of a Hugging Face dataset")
    return dataset.remove_columns(name), list(dataset[name])


def _natural_clients(train: Examples, clients: Any) -> tuple[Examples, list[Tensor] | None]:
    """Groups, if there is a label per example; else lists of indices."""
    given = clients.tolist() if isinstance(clients, Tensor | np.ndarray) else list(clients)
    if given and isinstance(given[0], Sequence | Tensor | np.ndarray) and not isinstance(given[0], str):
        parts = [torch.as_tensor(np.asarray(part), dtype=torch.int64).flatten() for part in given]
        every = torch.cat(parts)
        if len(every) and not (int(every.min()) >= 0 and int(every.max()) < len(train)):
            raise DataError(f"clients: an index is out of range, expected 0 to {len(train) - 1}")
        if len(set(every.tolist())) < len(every):
            raise DataError("clients: an example has two clients, expected lists of indices that do not overlap")
        return train, parts
    if len(given) != len(train):
        raise DataError(f"clients: got {len(given)} labels, expected {len(train)}, one per training example")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(given))}
    return Examples(train.x, train.y, torch.tensor([numbers[label] for label in given])), None


def _check_structure(what: str, part: Examples, train: Examples) -> None:
    ours, theirs = part.tensors(), train.tensors()
    if ours.keys() != theirs.keys():
        raise DataError(f"{what}: has the inputs {sorted(ours)}, expected {sorted(theirs)} as in train")
    for name, tensor in ours.items():
        if name != "y" and tensor.shape[1:] != theirs[name].shape[1:]:
            shapes = tuple(tensor.shape[1:]), tuple(theirs[name].shape[1:])
            raise DataError(f"{what}: an example of {name} has shape {shapes[0]}, expected {shapes[1]} as in train")
