"""What server and nodes tell each other, and how little of what a node says is believed.

A reply is data from a stranger. Names, types and shapes are compared exactly with the slice that was sent, sizes before
anything is read: an array of garbage, of one element that would be broadcast, or whose header promises a terabyte costs
nothing but its refusal. Values are looked at where every upload's are, in ``engine.round.check``.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from incofl.client import Upload
from incofl.data import Data
from incofl.engine.federation import Federation, Job
from incofl.errors import UploadError
from incofl.split import Slice
from incofl.tensors import Tensors, empty

VERSION = 2  # of everything below; server and nodes must agree
HEADER = 1024  # bytes that an array's own header may take, at most
LARGEST = 2**53  # bound of whole numbers that a node may report
LIMITS = ("memory", "compute", "bandwidth")


@dataclass(frozen=True)
class Answer:
    """What a node says of itself; what it leaves open is ``None``."""

    client: int | None = None  # its number in the federation
    level: int | None = None  # the level that it wants
    limits: Mapping[str, int] | None = None  # memory, compute and bandwidth, as in ``DeviceClass``
    examples: int | None = None  # number of its training examples, where only the node has them


class DataFacts(NamedTuple):
    """The attributes of ``Data`` that the examples of a single node may not show."""

    name: str = "own"
    classes: int | None = None
    vocabulary: int = 0
    sequence: bool = False

    @classmethod
    def of(cls, data: Data) -> "DataFacts":
        """Those of the server's data."""
        return cls(data.name, data.classes, data.vocabulary, data.sequence)


@dataclass(frozen=True)
class Order:
    """What the server tells a node to do."""

    run: str  # identifies the run, for what a node remembers of it
    config: str  # the run's config, as TOML
    job: Job
    memory: tuple[int, int] | None = None  # level and round of the turn from whose memory the node starts
    known: Answer | None = None  # what the node has said of itself, as far as its slice depends on it
    frozen: str = ""  # digest of the frozen part of the slice; empty if nothing is frozen
    data: DataFacts = field(default_factory=DataFacts)


@dataclass(frozen=True)
class Report:
    """What a node says of its turn, in addition to tensors: in a reply, and checked field by field."""

    round: int
    client: int
    level: int
    examples: int  # number of its training examples
    steps: int  # number of optimiser steps
    loss: float  # mean over the examples of all epochs
    labels: tuple[int, ...] = ()  # number of its examples of each class, for tasks with classes
    seconds: float = 0.0  # duration of the turn
    cpu_seconds: float = 0.0  # processor time
    peak_memory: int = 0  # bytes that the node's process used at its peak, since its start
    forgot: int = 0  # 1 if it had no memory where the server expected one
    tested: int = 0  # number of examples that the node holds out
    totals: tuple[float, ...] = ()  # of the task's first metric, of the received model on these examples
    version: int = VERSION


class OutOfMemory(UploadError):
    """A node had too little memory for its turn."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"out of memory ({reason})")


class LacksFrozen(UploadError):
    """A node does not have the frozen parameters of its slice."""


class Changed(UploadError):
    """A node is not what it was when its slice was cut."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("it says other limits than before")
        self.answer = answer


PROBLEMS = {"memory": OutOfMemory, "frozen": LacksFrozen}


def encode_order(order: Order, model: ArrayRecord, extra: ArrayRecord, frozen: ArrayRecord | None = None) -> RecordDict:
    """A turn: the slice without its frozen part, what else the method sends, and what to do with it.

    The ``frozen`` part is sent to a node that has said that it lacks it.
    """
    facts = {name: value for name, value in order.data._asdict().items() if value is not None}
    words = {"run": order.run, "config": order.config, "frozen": order.frozen}
    record = {"version": VERSION, **vars(order.job), "memory": list(order.memory or ()), **words}
    content = RecordDict({"model": model, "extra": extra, "order": ConfigRecord(record), "data": ConfigRecord(facts)})
    if frozen is not None:
        content["frozen"] = frozen
    return content if order.known is None else RecordDict({**content, **encode_answer(order.known)})


def decode_order(content: RecordDict) -> tuple[Order, Tensors, Tensors, Tensors]:
    """The order, the model, what else the method sends, and the frozen part, if it was sent; the server is trusted."""
    record = dict(content["order"])
    if (version := record.pop("version")) != VERSION:
        raise UploadError(f"the server speaks version {version} of the messages, this node {VERSION}")
    job = Job(*(record.pop(name) for name in ("client", "level", "round")))
    known = _read_answer(content["answer"]) if "answer" in content else None
    memory, facts = tuple(record.pop("memory")) or None, DataFacts(**content["data"])
    order = Order(job=job, memory=memory, known=known, data=facts, **record)
    model, extra, frozen = (
        content[name].to_torch_state_dict() if name in content else {} for name in ("model", "extra", "frozen")
    )
    return order, model, extra, frozen


def encode_reply(upload: Upload, round: int, **measured: Any) -> RecordDict:
    """The result of a turn, and what the node ``measured``: fields of ``Report``."""
    same = {name: getattr(upload, name) for name in ("client", "level", "examples", "steps", "loss")}
    labels = () if upload.labels is None else tuple(upload.labels.tolist())
    report = vars(Report(round=round, **same, labels=labels, **measured))
    tensors = {name: arrays(getattr(upload, name)) for name in ("update", "buffers", "extra")}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in report.items()}
    return RecordDict(tensors | {"report": MetricRecord(plain)})


def encode_problem(reason: str, kind: str = "") -> RecordDict:
    """Why there is no result; ``kind`` is ``memory`` or ``frozen`` if one of these was missing."""
    return RecordDict({"problem": ConfigRecord({"version": VERSION, "reason": reason, "kind": kind})})


def decode_reply(content: RecordDict, federation: Federation, job: Job, totals: int = 0) -> tuple[Upload, Report]:
    """The upload of a job, and what the node measured: ``totals`` numbers if it holds out examples, else none.

    Raises:
        OutOfMemory: the node says so.
        LacksFrozen: the node says so.
        Changed: it says what it can do now.
        UploadError: it says that something else went wrong, or what it says is not acceptable.
    """
    raise_problem(content)
    if "answer" in content:
        raise Changed(decode_answer(content))
    _check_keys(content, {"update", "buffers", "extra", "report"}, "the reply")
    layout, slice_ = federation.model.layout, federation.slice(job.level, job.round, job.client)
    names = {"update": layout.parameters, "buffers": layout.buffers, "extra": federation.method.client.extra(layout)}
    tensors: dict[str, Any] = {
        part: _decode(content[part], slice_, own, federation, part) for part, own in names.items()
    }
    classes = federation.data.classes if federation.task.classes else None
    report = _read_report(content["report"], classes or 0, totals)
    for name, value in {"version": VERSION, **vars(job)}.items():
        if getattr(report, name) != value:
            raise UploadError(f"it replies for {name} {getattr(report, name)}, expected {value}")
    examples, local = len(federation.partition[job.client]), federation.local
    if len(federation.data.train) and report.examples != examples:
        raise UploadError(f"it has {report.examples} examples, expected {examples}; is its data-root another?")
    most = local.epochs * math.ceil(report.examples / local.batch_size)
    if report.steps > most:
        raise UploadError(f"it has made {report.steps} steps, expected at most {most}")
    if report.tested and not totals:
        raise UploadError(f"it has tested {report.tested} examples, expected none")
    upload = Upload(
        **tensors,
        client=job.client,
        level=job.level,
        slice=slice_,
        examples=report.examples,
        steps=report.steps,
        loss=report.loss,
        labels=None if classes is None else torch.tensor(report.labels),
        normaliser=federation.method.client.normaliser(local, report.steps),  # scales all updates of a round
    )
    return upload, report


def _read_report(record: Any, labels: int, totals: int) -> Report:
    """A report whose fields have the right types, and lists of the right lengths."""
    if not isinstance(record, MetricRecord):
        raise UploadError("'report' is not a record of metrics")
    fields = {field.name: field.type for field in dataclasses.fields(Report)}
    _check_keys(record, set(fields), "'report'")
    values, lengths = dict[str, Any](), {"labels": labels, "totals": totals if record["tested"] else 0}
    for name, kind in fields.items():
        check, got = _whole if kind in (int, tuple[int, ...]) else _real, record[name]
        if name not in lengths:
            values[name] = check(got, name)
        elif isinstance(got, list) and len(got) == lengths[name]:
            values[name] = tuple(check(entry, name) for entry in got)
        else:
            raise UploadError(f"{name!r} is not a list of {lengths[name]} numbers")
    return Report(**values)


def encode_answer(answer: Answer) -> RecordDict:
    """What a node says of itself."""
    said = {"client": answer.client, "level": answer.level, "examples": answer.examples, **(answer.limits or {})}
    known = {name: value for name, value in said.items() if value is not None}
    return RecordDict({"answer": ConfigRecord({"version": VERSION, **known})})


def decode_answer(content: RecordDict) -> Answer:
    """What a node says of itself, checked."""
    raise_problem(content)
    _check_keys(content, {"answer"}, "the answer")
    return _read_answer(content["answer"])


def _read_answer(record: Any) -> Answer:
    if not isinstance(record, ConfigRecord) or record.keys() - {"version", "client", "level", "examples", *LIMITS}:
        raise UploadError("the answer holds what was not asked for")
    said = {name: _whole(value, name) for name, value in record.items()}
    if said.pop("version", None) != VERSION:
        raise UploadError(f"it speaks another version of the messages, expected {VERSION}")
    own = {name: said.pop(name) for name in LIMITS if name in said}
    return Answer(said.get("client"), said.get("level"), own or None, said.get("examples"))


def raise_problem(content: RecordDict) -> None:
    """Raises what a node says went wrong, if it says so."""
    if "problem" in content and isinstance(content["problem"], ConfigRecord):
        record = content["problem"]
        raise PROBLEMS.get(str(record.get("kind")), UploadError)(one_line(str(record.get("reason"))))


def one_line(text: str) -> str:
    """The last line of what may be a traceback, not too long, and nothing that a terminal would obey."""
    lines = [line.strip() for line in text[-4096:].splitlines() if line.strip()]
    return "".join(c if c.isprintable() else "?" for c in lines[-1][:300]) if lines else "no reason given"


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record: npy bytes, no pickle."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in tensors.items()})


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Identifies tensors by their names, types, shapes and values; empty if there are none."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in sorted(tensors.items()):
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest() if tensors else ""


def num_bytes(content: RecordDict) -> int:
    """Bytes of the arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _decode(record: Any, slice_: Slice, names: Set[str], federation: Federation, part: str) -> Tensors:
    """The tensors of a record, if names, shapes and types are exactly those of the slice."""
    shapes = {name: shape for name, shape in slice_.shapes.items() if name in names}
    if not isinstance(record, ArrayRecord):
        raise UploadError(f"{part!r} is not a record of arrays")
    _check_keys(record, set(shapes), repr(part))
    found: Tensors = {}
    for name, shape in shapes.items():
        array, dtype = record[name], federation.model.initial[name].dtype
        expected = np.dtype(str(dtype).removeprefix("torch."))
        size, got = math.prod(shape) * expected.itemsize, len(array.data)
        if array.stype != "numpy.ndarray" or got > size + HEADER:
            raise UploadError(f"{part} {name!r} has {got} bytes of {array.stype[:20]!r}, its slice expects {size}")
        held, fortran, kind, start = _header(array.data, f"{part} {name!r}")
        if held != shape or tuple(array.shape) != shape or kind != expected or got != start + size:
            raise UploadError(
                f"{part} {name!r} has shape {held} of {kind} in {got} bytes, its slice expects {shape} of {expected}; "
                "was it trained with another round's slice?"
            )
        values = np.frombuffer(array.data, expected, offset=start).reshape(shape, order="F" if fortran else "C")
        # A copy, in the order of memory that all tensors of models have: bytes that came cannot be written to.
        found[name] = empty(shape, dtype)
        np.copyto(found[name].numpy(), values)
    return found


def _header(data: bytes, what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """What the header of npy bytes claims: shape, whether columns come first, type; and where it ends."""
    file = BytesIO(data[: 2 * HEADER])
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError
        shape, fortran, kind = np.lib.format.read_array_header_1_0(file, max_header_size=HEADER)
    except Exception:  # a parser may raise anything at what a stranger sent
        raise UploadError(f"{what} is not an array") from None
    return tuple(shape), fortran, kind, file.tell()


def _check_keys(record: Mapping[str, Any], expected: set[str], what: str) -> None:
    if odd := record.keys() ^ expected:
        name = min(odd, key=str)
        raise UploadError(f"{what} {'holds' if name in record else 'lacks'} {str(name)[:100]!r}")


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
        raise UploadError(f"{name!r} is {str(value)[:40]}, expected a whole number >= 0")
    return value


def _real(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UploadError(f"{name!r} is {str(value)[:40]}, expected a number")
    return float(value)
