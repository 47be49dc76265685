"""What server and nodes tell each other, and how little of what a node says is believed.

A reply is data from a stranger. Names, types and shapes are compared exactly with the slice that was sent, sizes before
anything is read: an array of garbage, of one element that would be broadcast, or whose header promises a terabyte costs
nothing but its refusal. Values are looked at where every upload's are, in ``engine.round.check``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from incofl.data import OWN
from incofl.engine.federation import Federation, Job
from incofl.errors import UploadError
from incofl.method import Upload
from incofl.tensors import Tensors, empty

VERSION = 1  # of everything below; server and nodes must agree
HEADER = 1024  # bytes that an array's own header may take, at most
LARGEST = 2**53  # of whole numbers that a node may report


@dataclass(frozen=True)
class Order:
    """What the server tells a node to do.

    Attributes:
        run: identifies the run, for what a node remembers of it.
        config: the run's config, as TOML.
        job: client, level and round.
        memory: level and round of the turn whose memory the node shall start from: its last accepted one.
        known: what the node has said of itself, as far as its slice depends on it.
    """

    run: str
    config: str
    job: Job
    memory: tuple[int, int] | None = None
    known: "Answer | None" = None


@dataclass(frozen=True)
class Report:
    """What a node measured of its turn.

    Attributes:
        seconds: that it took.
        cpu_seconds: of processors.
        peak_memory: bytes that the node's process had in use at its peak, since its start.
        forgot: whether it had no memory where the server expected one.
        correct: answers of the model that it was sent, on examples that it holds out.
        tested: how many these are.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    forgot: bool = False
    correct: int = 0
    tested: int = 0


@dataclass(frozen=True)
class Answer:
    """What a node says of itself; what it leaves open is ``None``.

    Attributes:
        client: its number in the federation.
        level: the level that it wants.
        limits: memory, compute and bandwidth, as in ``DeviceClass``.
        examples: how many it has, where the server cannot know.
    """

    client: int | None = None
    level: int | None = None
    limits: Mapping[str, int] | None = None
    examples: int | None = None


def encode_order(order: Order, model: ArrayRecord, sent: ArrayRecord) -> RecordDict:
    """A turn: the slice, what the server sends besides, and what to do with it."""
    job = order.job
    level, round = order.memory or (-1, -1)
    numbers = {"version": VERSION, "round": job.round, "client": job.client, "level": job.level}
    memory = {"memory_level": level, "memory_round": round}
    words = {"run": order.run, "config": order.config}
    content = RecordDict({"model": model, "sent": sent, "order": ConfigRecord({**numbers, **memory, **words})})
    return content if order.known is None else RecordDict({**content, **encode_answer(order.known)})


def decode_order(content: RecordDict) -> tuple[Order, Tensors, Tensors]:
    """What ``encode_order`` was given; the server is trusted."""
    record = content["order"]
    if record["version"] != VERSION:
        raise UploadError(f"the server speaks version {record['version']} of the messages, this node {VERSION}")
    job = Job(record["client"], record["level"], record["round"])
    memory = (record["memory_level"], record["memory_round"]) if record["memory_round"] >= 0 else None
    known = _read_answer(content["answer"]) if "answer" in content else None
    order = Order(record["run"], record["config"], job, memory, known)
    return order, *(content[name].to_torch_state_dict() for name in ("model", "sent"))


def encode_reply(upload: Upload, round: int, report: Report) -> RecordDict:
    """A turn's result."""
    assert upload.labels is not None
    record = {
        **{"version": VERSION, "round": round, "client": upload.client, "level": upload.level},
        **{"examples": upload.examples, "steps": upload.steps, "loss": upload.loss},
        "labels": upload.labels.tolist(),
        **{"seconds": report.seconds, "cpu_seconds": report.cpu_seconds, "peak_memory": report.peak_memory},
        **{"forgot": int(report.forgot), "correct": report.correct, "tested": report.tested},
    }
    tensors = {"update": upload.update, "buffers": upload.buffers, "extra": upload.extra}
    return RecordDict({name: arrays(part) for name, part in tensors.items()} | {"report": MetricRecord(record)})


def encode_problem(reason: str, memory: bool = False) -> RecordDict:
    """Why there is no result, and whether that is for want of memory."""
    return RecordDict({"problem": ConfigRecord({"version": VERSION, "reason": reason, "memory": memory})})


class OutOfMemory(UploadError):
    """A node had too little memory for its turn."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"out of memory ({reason})")


class Changed(UploadError):
    """A node is not what it was when its slice was cut."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("it says other limits than before")
        self.answer = answer


def decode_reply(content: RecordDict, federation: Federation, job: Job) -> tuple[Upload, Report]:
    """The upload of a job.

    Raises:
        OutOfMemory: the node says so.
        Changed: it says what it can do now.
        UploadError: it says that something else went wrong, or what it says is not acceptable.
    """
    raise_problem(content)
    if "answer" in content:
        raise Changed(decode_answer(content))
    _check_keys(content, {"update", "buffers", "extra", "report"}, "the reply")
    layout, piece = federation.model.layout, federation.slice(job.level, job.round)
    tensors = [
        _decode(content[part], {name: piece.shapes[name] for name in piece.shapes if name in names}, federation, part)
        for part, names in (
            ("update", layout.parameters),
            ("buffers", layout.buffers),
            ("extra", federation.method.client.extra(layout)),
        )
    ]
    record = content["report"]
    if not isinstance(record, MetricRecord):
        raise UploadError("'report' is not a record of metrics")
    wholes = ("version", "round", "client", "level", "examples", "steps", "peak_memory", "forgot", "correct", "tested")
    reals = ("loss", "seconds", "cpu_seconds")
    _check_keys(record, {*wholes, *reals, "labels"}, "'report'")
    whole = {name: _whole(record[name], name) for name in wholes}
    real = {name: _real(record[name], name) for name in reals}
    expected = {"version": VERSION, "round": job.round, "client": job.client, "level": job.level}
    for name, value in expected.items():
        if whole[name] != value:
            raise UploadError(f"it replies for {name} {whole[name]}, expected {value}")
    examples = len(federation.partition[job.client])
    if federation.data.name != OWN and whole["examples"] != examples:
        raise UploadError(f"it has {whole['examples']} examples, expected {examples}; is its data-root another?")
    labels = record["labels"]
    if not isinstance(labels, list) or len(labels) != federation.data.classes:
        raise UploadError(f"'labels' is not a list of {federation.data.classes} numbers")
    if whole["correct"] > whole["tested"]:
        raise UploadError(f"{whole['correct']} of its {whole['tested']} answers are correct")
    local = federation.local
    most = local.epochs * math.ceil(whole["examples"] / local.batch_size)
    if whole["steps"] > most:
        raise UploadError(f"it has made {whole['steps']} steps, expected at most {most}")
    upload = Upload(
        client=job.client,
        level=job.level,
        slice=piece,
        update=tensors[0],
        buffers=tensors[1],
        examples=whole["examples"],
        steps=whole["steps"],
        loss=real["loss"],
        extra=tensors[2],
        labels=torch.tensor([_whole(count, "labels") for count in labels]),
        length=federation.method.client.length(local, whole["steps"]),  # by which all updates of a round are scaled
    )
    measured = {name: whole[name] for name in ("peak_memory", "correct", "tested")}
    return upload, Report(real["seconds"], real["cpu_seconds"], forgot=bool(whole["forgot"]), **measured)


def encode_question() -> RecordDict:
    """Asks a node what it can do."""
    return RecordDict({"question": ConfigRecord({"version": VERSION})})


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
    limits = ("memory", "compute", "bandwidth")
    if not isinstance(record, ConfigRecord) or record.keys() - {"version", "client", "level", "examples", *limits}:
        raise UploadError("the answer holds what was not asked for")
    said = {name: _whole(value, name) for name, value in record.items()}
    if said.pop("version", None) != VERSION:
        raise UploadError(f"it speaks another version of the messages, expected {VERSION}")
    own = {name: said.pop(name) for name in limits if name in said}
    return Answer(said.get("client"), said.get("level"), own or None, said.get("examples"))


def raise_problem(content: RecordDict) -> None:
    """Raises what a node says went wrong, if it says so."""
    if "problem" in content and isinstance(content["problem"], ConfigRecord):
        record = content["problem"]
        kind = OutOfMemory if record.get("memory") is True else UploadError
        raise kind(one_line(str(record.get("reason"))))


def one_line(text: str) -> str:
    """The last line of what may be a traceback, not too long, and nothing that a terminal would obey."""
    lines = [line.strip() for line in text[-4096:].splitlines() if line.strip()]
    return "".join(c if c.isprintable() else "?" for c in lines[-1][:300]) if lines else "no reason given"


def arrays(tensors: Tensors) -> ArrayRecord:
    """Named tensors as a record: npy bytes, no pickle."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in tensors.items()})


def num_bytes(content: RecordDict) -> int:
    """Bytes of the arrays in a message."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _decode(record: Any, shapes: Mapping[str, tuple[int, ...]], federation: Federation, part: str) -> Tensors:
    """The tensors of a record, if they are exactly of these names and shapes and of the server's types."""
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
        flat = np.frombuffer(array.data, expected, offset=start)
        values = flat.reshape(shape, order="F" if fortran else "C")
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
    except Exception:  # whatever a parser raises at what a stranger sent
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
