"""What server and nodes tell each other, and how little of what a node says is believed.

A reply is data from a stranger. Names, types and shapes are compared exactly with the slice that was sent, sizes before
anything is read: a header that promises a terabyte costs nothing. ``engine.round.check`` looks at the values.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from io import BytesIO
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Le
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import AllowInfNan
from torch import Tensor

from incofl.client import Upload
from incofl.data.cache import digest
from incofl.engine.federation import Federation, Job
from incofl.errors import ConfigError, UploadError
from incofl.options import options
from incofl.tensors import Tensors, empty

VERSION = 4  # of everything below; server and nodes must agree
HEADER = 1024  # bytes that an array's own header may take, at most
TENSORS = ("update", "buffers", "extra", "smallest")  # the parts of an upload that are tensors
NUMBERS = ("client", "level", "examples", "steps", "loss")  # what an upload and a report both say

Whole = Annotated[int, Ge(0), Le(2**53)]
Finite = Annotated[float, AllowInfNan(False)]
Kind = Literal["", "unreachable", "crashed", "late", "memory", "frozen", "changed"]
T = TypeVar("T", "Answer", "Order", "Report")


@options("answer")
class Answer:
    """What a node says of itself; what it leaves open is ``None``."""

    client: Whole | None = None  # its number in the federation
    level: Whole | None = None  # the level that it wants
    memory: Whole | None = None  # the limits of ``DeviceClass``
    compute: Whole | None = None
    bandwidth: Whole | None = None
    examples: Whole | None = None  # number of its training examples, where only the node has them
    version: Whole = VERSION

    @property
    def limits(self) -> dict[str, int]:
        """The limits that it names."""
        return {key: limit for key in ("memory", "compute", "bandwidth") if (limit := getattr(self, key)) is not None}


@options("order")
class Order(Job):
    """What the server tells a node to do."""

    client: Whole = 0
    level: Whole = 0
    round: Whole = 0
    drawn: tuple[Whole, ...] = ()
    run: str = ""  # identifies the run, for what a node remembers of it
    config: str = ""  # the run's config, as TOML
    memory: tuple[Whole, Whole] | None = None  # level and round of the turn from whose memory the node starts
    known: str = ""  # what the node has said of itself, as far as its slice depends on it; empty: anything
    frozen: str = digest({})  # identifies the frozen part of the slice
    facts: str = "{}"  # attributes of ``Data`` that one node's may not show, as JSON
    version: Whole = VERSION

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{0,64}", self.run):  # it names a folder, which must be inside the state-dir
            raise ConfigError(f"order.run: got {self.run!r:.80}, expected letters and digits")


@options("report")
class Report:
    """What a node says of its turn, in addition to tensors."""

    round: Whole
    client: Whole
    level: Whole
    examples: Whole  # number of its training examples
    steps: Whole  # number of optimiser steps
    loss: float  # mean over the examples of all epochs
    labels: tuple[Whole, ...] = ()  # number of its examples of each class, for tasks with classes
    seconds: float = 0.0  # duration of the turn
    cpu_seconds: float = 0.0  # processor time
    peak_memory: Whole = 0  # bytes that the node's process used at its peak, since its start
    forgot: Whole = 0  # 1 if it had no memory where the server expected one
    tested: Whole = 0  # number of examples that the node holds out
    totals: tuple[Finite, ...] = ()  # of the task's first metric, of the received model on these examples
    version: Whole = VERSION


class Refusal(UploadError):
    """Why a node's reply is not accepted; ``kind`` says what follows from it, ``answer`` what the node is now."""

    def __init__(self, reason: str, kind: Kind = "", answer: Answer | None = None) -> None:
        super().__init__(reason)
        self.kind, self.answer = kind, answer


def encode_order(order: Order, tensors: Mapping[str, ArrayRecord]) -> RecordDict:
    """A turn, with the ``model`` without its frozen part, the method's ``extra``, and ``frozen`` if a node lacks it."""
    return RecordDict({**tensors, "order": ConfigRecord(_plain(order))})


def decode_order(content: RecordDict) -> tuple[Order, Tensors, Tensors, Tensors]:
    """The order, the model, what else the method sends, and the frozen part, if it was sent.

    The server is trusted with what is trained, and with nothing else on the node.
    """
    order, sent = _read(Order, content.get("order")), []
    for name in ("model", "extra", "frozen"):
        record = content.get(name, ArrayRecord())
        if not isinstance(record, ArrayRecord):
            raise Refusal(f"{name!r} is not a record of arrays")
        try:
            sent.append(record.to_torch_state_dict())
        except Exception:  # a parser may raise anything at what a stranger sent
            raise Refusal(f"{name!r} holds what is not an array") from None
    return order, sent[0], sent[1], sent[2]


def encode_reply(upload: Upload, round: int, **measured: Any) -> RecordDict:
    """The result of a turn, and what the node ``measured``: fields of ``Report``."""
    numbers = {name: getattr(upload, name) for name in NUMBERS}
    labels = () if upload.labels is None else tuple(upload.labels.tolist())
    report = MetricRecord(_plain(Report(round=round, **numbers, labels=labels, **measured)))
    return RecordDict({part: arrays(getattr(upload, part)) for part in TENSORS} | {"report": report})


def encode_answer(answer: Answer) -> RecordDict:
    """What a node says of itself."""
    return RecordDict({"answer": ConfigRecord(_plain(answer))})


def encode_problem(reason: str, kind: Kind = "") -> RecordDict:
    """Why there is no result; ``kind`` is ``memory`` or ``frozen`` if one of these was missing."""
    return RecordDict({"problem": ConfigRecord({"version": VERSION, "reason": reason, "kind": kind})})


def decode_reply(
    content: RecordDict, federation: Federation, job: Job, totals: int = 0, most_examples: int | None = None
) -> tuple[Upload, Report]:
    """The upload of a job, and what the node measured: ``totals`` numbers if it holds out examples, else none.

    Where only the node knows its examples, ``most_examples`` count: its weight in the mean and its number of steps, by
    which FedNova divides, follow from them.
    """
    _raise_problem(content)
    if "answer" in content:
        raise Refusal("it says other limits than before", "changed", decode_answer(content))
    _check_keys(content, {*TENSORS, "report"}, "the reply")
    layout, slice_ = federation.model.layout, federation.slice_of(job)
    names = {"update": layout.parameters, "buffers": layout.buffers, "extra": federation.method.client.extra(layout)}
    tensors: dict[str, Any] = {}
    for part, own in names.items():
        shapes = {name: shape for name, shape in slice_.shapes.items() if name in own - slice_.given}
        tensors[part] = _decode(content[part], part, shapes, federation.model.initial)
    smallest = federation.method.smallest_statistics(layout, federation.population, job.level)
    shapes = {} if smallest is None else dict(smallest.shapes)
    tensors["smallest"] = _decode(content["smallest"], "smallest", shapes, federation.model.initial)
    report = _read(Report, content["report"])
    for name in ("client", "level", "round"):
        if getattr(report, name) != (value := getattr(job, name)):
            raise Refusal(f"it replies for {name} {getattr(report, name)}, expected {value}")
    classes = federation.data.classes if federation.task.classes else None
    for name, length in (("labels", classes or 0), ("totals", totals if report.tested else 0)):
        if len(getattr(report, name)) != length:
            raise Refusal(f"{name!r} is not a list of {length} numbers")
    local, claimed, counted = federation.local, report.examples, len(federation.partition[job.client])
    if most_examples is not None:
        counted = min(claimed, most_examples)
    elif claimed != counted:
        raise Refusal(f"it has {claimed} examples, expected {counted}; is its data-root another?")
    if sum(report.labels) > (most := claimed * targets_per_example(federation)):
        raise Refusal(f"it has {sum(report.labels)} labels, expected at most {most}")
    if report.steps > (most := most_steps(federation, job.level, claimed)):
        raise Refusal(f"it has made {report.steps} steps, expected at most {most}")
    steps = min(report.steps, most_steps(federation, job.level, counted))
    if report.tested and not totals:
        raise Refusal(f"it has tested {report.tested} examples, expected none")
    upload = Upload(
        **tensors,
        **{name: getattr(report, name) for name in NUMBERS} | {"examples": counted, "steps": steps},
        slice=slice_,
        labels=None if classes is None else torch.tensor(report.labels),
        normaliser=federation.method.client.normaliser(local, steps),  # scales all updates of a round
    )
    return upload, report


def most_steps(federation: Federation, level: int, examples: int) -> int:
    """Number of steps that a client of a level with so many examples makes at most."""
    local = federation.local
    return federation.method.anchor.epochs(local.epochs, level) * math.ceil(examples / local.batch_size)


def targets_per_example(federation: Federation) -> int:
    """Number of targets of an example: more than one for texts and segmentations."""
    return math.prod(federation.data.train.y.shape[1:])


def decode_answer(content: RecordDict) -> Answer:
    """What a node says of itself, checked."""
    _raise_problem(content)
    _check_keys(content, {"answer"}, "the answer")
    return _read(Answer, content["answer"])


def _raise_problem(content: RecordDict) -> None:
    if "problem" in content and isinstance(record := content["problem"], ConfigRecord):
        reason, kind = one_line(str(record.get("reason"))), record.get("kind")
        if kind == "memory":
            raise Refusal(f"out of memory ({reason})", "memory")
        raise Refusal(reason, "frozen" if kind == "frozen" else "")


def _plain(said: Answer | Order | Report) -> dict[str, Any]:
    """What is said as a record can hold it: lists instead of tuples, and nothing instead of ``None``."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(said).items() if v is not None}


def _read(cls: type[T], record: Any) -> T:
    """What is said, as an object that checks its own values."""
    what, defaults = f"the {cls.__name__.lower()}", {field.name: field.default for field in fields(cls)}
    if not isinstance(record, ConfigRecord | MetricRecord):
        raise Refusal(f"{what} is not a record of values")
    if (version := record.get("version", VERSION)) != VERSION:
        raise Refusal(one_line(f"{what} is of version {version} of the messages, expected {VERSION}"))
    _check_keys(record, {name for name, value in defaults.items() if value is not None or name in record}, what)
    try:
        return cls(**record)
    except ConfigError as problem:
        raise Refusal(one_line(str(problem))) from None


def one_line(text: str) -> str:
    """The last line of what may be a traceback, not too long, and nothing that a terminal would obey."""
    lines = [line.strip() for line in text[-4096:].splitlines() if line.strip()]
    return "".join(c if c.isprintable() else "?" for c in lines[-1][:300]) if lines else "no reason given"


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record: npy bytes, no pickle."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in tensors.items()})


def num_bytes(content: RecordDict) -> int:
    """Bytes of the arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _decode(record: Any, part: str, shapes: Mapping[str, tuple[int, ...]], like: Tensors) -> Tensors:
    """The tensors of a record, if names, shapes and types are exactly those that are expected."""
    if not isinstance(record, ArrayRecord):
        raise Refusal(f"{part!r} is not a record of arrays")
    _check_keys(record, set(shapes), repr(part))
    found: Tensors = {}
    for name, shape in shapes.items():
        what, array, expected = f"{part} {name!r}", record[name], np.dtype(str(like[name].dtype).removeprefix("torch."))
        size, got = math.prod(shape) * expected.itemsize, len(array.data)
        if array.stype != "numpy.ndarray" or got > size + HEADER:
            raise Refusal(f"{what} has {got} bytes of {array.stype[:20]!r}, its slice expects {size}")
        file = BytesIO(array.data[: 2 * HEADER])
        try:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError
            held, _, kind = np.lib.format.read_array_header_1_0(file, max_header_size=HEADER)
        except Exception:  # a parser may raise anything at what a stranger sent
            raise Refusal(f"{what} is not an array") from None
        if (held, tuple(array.shape), kind, got) != (shape, shape, expected, file.tell() + size):
            claim = f"has shape {held} of {kind} in {got} bytes, its slice expects {shape} of {expected}"
            raise Refusal(f"{what} {claim}; was it trained with another round's slice?")
        # In the order of memory that all tensors of models have.
        found[name] = empty(shape, like[name].dtype).copy_(torch.from_numpy(array.numpy()))
    return found


def _check_keys(record: Mapping[str, Any], expected: set[str], what: str) -> None:
    if odd := record.keys() ^ expected:
        name = min(odd, key=str)
        raise Refusal(f"{what} {'holds' if name in record else 'lacks'} {str(name)[:100]!r}")
