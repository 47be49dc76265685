"""Replies are data from strangers."""

import dataclasses
import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict

from incofl.engine.executor import InProcess
from incofl.engine.federation import Federation, Job
from incofl.engine.round import RoundStats
from incofl.errors import UploadError
from incofl.flower import make_client_app
from incofl.flower.protocol import (
    Answer,
    Order,
    Refusal,
    arrays,
    decode_answer,
    decode_order,
    decode_reply,
    encode_answer,
    encode_order,
    encode_problem,
)
from tests.federations import tiny_config, tiny_federation
from tests.flower.loop import LoopGrid, wired

CONFIG = ("method=incoscaffold", "split.kind=hetero", "data.limit=60")
JOB = Job(0, 1, 3)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return tiny_federation(*CONFIG)


@pytest.fixture(scope="module")
def genuine(federation: Federation) -> RecordDict:
    """A node's reply in round 4."""
    LoopGrid(None)
    server, slice_ = federation.start(), federation.slice(JOB.level, JOB.round)
    model, extra = (arrays(slice_.look(part)) for part in (server.shared, server.extra["variate"]))
    order = Order(**vars(JOB), run="run", config=tiny_config(*CONFIG).to_toml())
    message = Message(wired(encode_order(order, {"model": model, "extra": extra})), 1, MessageType.TRAIN)
    return make_client_app()(message, Context(0, 1, {}, RecordDict(), {})).content


def test_a_genuine_reply_is_the_engines_upload(federation: Federation, genuine: RecordDict) -> None:
    upload, report = decode_reply(wired(genuine), federation, JOB)
    server = dataclasses.replace(federation.start(), round=JOB.round)
    ((expected,),) = InProcess(federation).train(server, [JOB])
    for part in ("update", "buffers", "extra"):
        ours, theirs = getattr(upload, part), getattr(expected, part)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    assert (upload.examples, upload.steps, upload.loss) == (expected.examples, expected.steps, expected.loss)
    assert upload.labels is not None
    assert expected.labels is not None
    assert torch.equal(upload.labels, expected.labels)
    assert report.seconds > 0
    assert not report.forgot


def put(record: str, name: str, value: object) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content[record][name] = value

    return change


def drop(record: str, name: str | None = None) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        if name is None:
            del content[record]
        else:
            del content[record][name]

    return change


def raw(shape: tuple[int, ...], data: bytes, dtype: str = "float32", stype: str = "numpy.ndarray") -> Array:
    return Array(dtype, shape, stype, data)


def npy(shape: tuple[int, ...], descr: str = "<f4", payload: bytes = b"") -> bytes:
    """A header that claims a shape, before what is not of it."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + payload


BIAS = (10,)  # of fc.bias
BAD: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "another name": (put("update", "fc.bias2", Array(np.zeros(10, np.float32))), "'update' holds 'fc.bias2'"),
    "a missing name": (drop("update", "fc.bias"), "'update' lacks 'fc.bias'"),
    "one element": (
        put("update", "fc.bias", Array(np.zeros(1, np.float32))),
        r"has shape \(1,\) of float32 in 132 bytes",
    ),
    "one element of the right size": (
        put("update", "fc.bias", raw((10, 1), npy((10, 1), payload=bytes(40)))),
        r"has shape \(10, 1\) of float32 in 168 bytes, its slice expects \(10,\)",
    ),
    "a shape that the header belies": (
        put("update", "fc.bias", raw(BIAS, npy((1, 10), payload=bytes(40)))),
        r"has shape \(1, 10\)",
    ),
    "another type": (put("update", "fc.bias", Array(np.zeros(5, np.float64))), "has shape"),
    "another order of bytes": (put("update", "fc.bias", raw(BIAS, npy(BIAS, ">f4", bytes(40)))), "has shape"),
    "objects": (put("update", "fc.bias", raw(BIAS, npy(BIAS, "|O", bytes(40)))), "fc.bias"),
    "a header that promises a terabyte": (
        put("update", "fc.bias", raw(BIAS, npy((2**38,), payload=bytes(40)))),
        r"has shape \(274877906944,\)",
    ),
    "garbage": (put("update", "fc.bias", raw(BIAS, b"\x80\x04" * 80)), "is not an array"),
    "too much garbage": (put("update", "fc.bias", raw(BIAS, bytes(10**6))), "has 1000000 bytes"),
    "another serialisation": (put("update", "fc.bias", raw(BIAS, bytes(60), stype="pickle")), "'pickle'"),
    "a record more": (lambda content: content.__setitem__("more", ArrayRecord()), "the reply holds 'more'"),
    "a record less": (drop("extra"), "the reply lacks 'extra'"),
    "a record of another kind": (
        lambda content: content.__setitem__("update", ConfigRecord({"fc.bias": 1})),
        "'update' is not a record of arrays",
    ),
    "metrics of another kind": (
        lambda content: content.__setitem__("report", ConfigRecord({"round": 3})),
        "the report lacks 'client'",
    ),
    "an old round": (put("report", "round", 2), "it replies for round 2, expected 3"),
    "another client": (put("report", "client", 5), "it replies for client 5, expected 0"),
    "another level": (put("report", "level", 2), "it replies for level 2, expected 1"),
    "another version": (
        put("report", "version", 99),
        "the report is of version 99 of the messages, expected 4",
    ),
    "a metric more": (put("report", "bonus", 1), "the report holds 'bonus'"),
    "a metric less": (drop("report", "steps"), "the report lacks 'steps'"),
    "half a step": (put("report", "steps", 0.5), r"report\.steps: got 0\.5, expected a whole number"),
    "negative steps": (put("report", "steps", -1), r"report\.steps: got -1, expected a whole number from 0"),
    "many examples": (put("report", "examples", 10**9), "it has 1000000000 examples, expected"),
    "a loss that is none": (put("report", "loss", math.nan), r"report\.loss: got nan, expected a number"),
    "a normaliser of its own": (put("report", "normaliser", 1e-300), "the report holds 'normaliser'"),
    "held-out examples where there are none": (put("report", "tested", 3), "it has tested 3 examples, expected none"),
    "totals of nothing": (put("report", "totals", [3.0, 4.0]), "'totals' is not a list of 0 numbers"),
    "more steps than it has batches": (put("report", "steps", 2**40), "it has made 1099511627776 steps, expected at"),
    "labels that are no list": (put("report", "labels", 1), r"report\.labels: got 1, expected a list"),
    "half a label": (put("report", "labels", [0.5] * 10), r"report\.labels: got \[0\.5, .*\], expected a list"),
    "labels of too many classes": (put("report", "labels", [1] * 11), "'labels' is not a list of 10"),
    "negative labels": (put("report", "labels", [-1] * 10), r"report\.labels: got \[-1, .*\], expected a list"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_refused(what: str, federation: Federation, genuine: RecordDict) -> None:
    content = wired(genuine)
    change, reason = BAD[what]
    change(content)
    with pytest.raises(UploadError, match=reason):
        decode_reply(wired(content), federation, JOB)


def test_garbage_costs_no_memory(federation: Federation, genuine: RecordDict) -> None:
    """Neither a gigabyte that came nor one that a header promises is copied."""
    for data in (npy((2**28,), payload=bytes(40)), bytes(2**26)):
        content = wired(genuine)
        content["update"]["fc.bias"] = raw((10,), data)
        tracemalloc.start()
        with pytest.raises(UploadError):
            decode_reply(content, federation, JOB)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20


@pytest.mark.parametrize(("value", "words"), [(np.nan, "not finite"), (1e20, "values up to 1.0e+20, expected a norm")])
@pytest.mark.parametrize("part", ["update", "buffers", "extra"])
def test_values_out_of_bounds_are_refused_where_all_uploads_are(
    part: str, value: float, words: str, federation: Federation, genuine: RecordDict
) -> None:
    content = wired(genuine)
    name = min(n for n, array in content[part].items() if array.dtype == "float32")
    values = content[part][name].numpy().copy()
    values.flat[-1] = value
    content[part][name] = Array(values)
    upload, _ = decode_reply(content, federation, JOB)
    stats = RoundStats()
    assert list(stats.validated(iter([[upload]]), federation.start())) == [[]]
    assert words in str(stats.rejected[0]["reason"])


def test_what_nodes_say_went_wrong(federation: Federation) -> None:
    with pytest.raises(Refusal, match=r"^out of memory \(no room\)$") as problem:
        decode_reply(wired(encode_problem("Traceback\n  no room\n", "memory")), federation, JOB)
    assert problem.value.kind == "memory"
    with pytest.raises(Refusal, match=r"^no reason given$") as problem:
        decode_reply(wired(encode_problem("", "late")), federation, JOB)
    assert problem.value.kind == ""  # what a node may not say of itself
    with pytest.raises(UploadError, match=r"^\?\[2J\?\[31mdanger\?$"):  # nothing that a terminal would obey
        decode_reply(wired(encode_problem("\x1b[2J\x1b[31mdanger\x07")), federation, JOB)
    with pytest.raises(UploadError, match=r"^x{300}$"):
        decode_reply(wired(encode_problem("x" * 10**6)), federation, JOB)


def test_orders_and_answers_come_back() -> None:
    tensors = {"a": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "n": torch.tensor(7)}
    for memory, known in ((None, ""), ((2, 0), str(Answer(0, 1, memory=7)))):
        order = Order(**vars(JOB), run="r", config="seed = 1", memory=memory, known=known, frozen="abc", facts="[1]")
        sent = {"model": arrays(tensors), "extra": arrays({})}
        sent |= {} if memory is None else {"frozen": arrays({"f": torch.ones(2)})}
        found, model, extra, frozen_part = decode_order(wired(encode_order(order, sent)))
        assert found == order
        assert (found.memory, found.known, found.facts) == (memory, known, "[1]")
        assert torch.equal(model["a"], tensors["a"])
        assert model["n"].shape == ()
        assert extra == {}
        assert list(frozen_part) == ([] if memory is None else ["f"])
    for answer in (Answer(), Answer(3, 0, memory=5, examples=0), Answer(level=2)):
        assert decode_answer(wired(encode_answer(answer))) == answer


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"version": 4, "client": -1}, r"answer\.client: got -1, expected a whole number from 0"),
        ({"version": 4, "level": "high"}, r"answer\.level: got 'high', expected"),
        ({"version": 4, "memory": True}, r"answer\.memory: got True, expected"),
        ({"version": 1}, "the answer is of version 1 of the messages, expected 4"),
        ({"version": 4, "secret": 1}, "the answer holds 'secret'"),
    ],
)
def test_bad_answers_are_refused(record: dict[str, object], reason: str) -> None:
    with pytest.raises(UploadError, match=reason):
        decode_answer(wired(RecordDict({"answer": ConfigRecord(record)})))
    with pytest.raises(UploadError, match=r"the answer lacks 'answer'|holds"):
        decode_answer(RecordDict({"metrics": MetricRecord({"a": 1})}))


def test_an_order_of_another_version_is_refused_as_such() -> None:
    """Whatever else is in it."""
    with pytest.raises(Refusal, match="the order is of version 2 of the messages, expected 4"):
        decode_order(wired(RecordDict({"order": ConfigRecord({"version": 2, "job": 1})})))


def test_what_is_said_of_a_bad_value_is_short() -> None:
    for value in ("x" * 10**6, "\x1b[2J\n" * 10**5, [7] * 10**5):
        with pytest.raises(Refusal) as problem:
            decode_answer(wired(RecordDict({"answer": ConfigRecord({"version": 4, "level": value})})))
        assert len(str(problem.value)) <= 300
        assert str(problem.value).isprintable()
