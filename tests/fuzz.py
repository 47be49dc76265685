"""Feeds damaged, altered and invented inputs to everything that reads some: never a traceback, a hang, or all memory.

usage: python -m tests.fuzz [--examples 1000] [--seeds 0:1] [--only NAME ...]      (from the root of the repository)

Each target reads one kind of input, which Hypothesis makes from a genuine one: configs, device files, data files,
checkpoints, run folders (for report and for analyze), uploads, and the messages of Flower. What is wrong with an input
must be said in one line, as an ``IncoflError``; anything else is shown with the smallest input that causes it.
"""

import argparse
import copy
import dataclasses
import gzip
import itertools
import json
import math
import resource
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import incofl
from incofl.analysis.runs import by_seed, find_runs
from incofl.config import make_config, presets
from incofl.costs import load_devices
from incofl.data.cache import read_cache, unpack, write_cache
from incofl.data.images import _idx
from incofl.engine.checkpoint import load_checkpoint
from incofl.engine.executor import InProcess
from incofl.engine.files import read_sealed, write_sealed
from incofl.engine.round import RoundStats
from incofl.engine.run_folder import RunFolder
from incofl.errors import IncoflError
from tests.federations import tiny_config, tiny_federation

LONGEST = 20.0  # seconds of the processor that reading one input may take
MEMORY = 6 * 2**30  # bytes of addresses that all targets together may ask for, in addition to what torch takes
NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, -(2**70), 1e11, 1e400, -1e30, math.nan, 0.5, True])
WORDS = st.sampled_from(
    ["", "none", "auto", "../x", "/", "a:b", "hf:x", "object:x", "\x00", "é" * 9, "x" * 300, "1e400"]
)
LEAVES = st.one_of(st.none(), NUMBERS, WORDS, st.text(max_size=8))
VALUES = st.recursive(LEAVES, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(WORDS, inside, max_size=2))
EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat", "deepen"]), st.floats(0, 1), st.binary(max_size=9)),
    min_size=1,
    max_size=4,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]


def edited(raw: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """Bytes with some damage."""
    for kind, place, new in edits:
        at = min(int(place * len(raw)), max(len(raw) - 1, 0))
        if kind == "flip":
            raw = (
                raw[:at]
                + bytes(a ^ (b or 1) for a, b in zip(raw[at:], new or b"\x01", strict=False))
                + raw[at + max(len(new), 1) :]
            )
        elif kind == "cut":
            raw = raw[:at]
        elif kind == "insert":
            raw = raw[:at] + new + raw[at:]
        elif kind == "repeat":
            raw = raw[:at] + raw[at : at + 200] * 3 + raw[at + 200 :]
        else:
            raw = raw[:at] + b"[" * 3000 + raw[at:]
    return raw


def altered(value: Any, draw: Draw) -> Any:
    """A tree of values one of which is another, or gone."""
    value = copy.deepcopy(value)
    inside, key = value, None
    while isinstance(inside, dict | list) and inside:
        holder = inside
        key = (
            draw(st.sampled_from(sorted(holder, key=str)))
            if isinstance(holder, dict)
            else draw(st.integers(0, len(holder) - 1))
        )
        inside = holder[key]
        if draw(st.booleans()):
            break
    if key is None:
        return draw(VALUES)
    if isinstance(holder, dict) and draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = draw(VALUES)
    return value


class Inputs:
    """Genuine inputs, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def run(self) -> Path:
        keys = (
            "model.name=tiny-mlp",
            "data.limit=80",
            "method=incoscaffold",
            "eval.limit=20",
            "rounds=2",
            "record.every=1",
        )
        incofl.run(tiny_config(*keys), self.folder / "run", progress=False)
        return self.folder / "run"

    @cached_property
    def federation(self) -> Any:
        return tiny_federation("model.name=tiny-mlp", "data.limit=80", "method=incoscaffold")

    @cached_property
    def upload(self) -> Any:
        ((upload,),) = InProcess(self.federation).train(self.federation.start(), self.federation.schedule(0, 1))
        return upload

    @cached_property
    def reply(self) -> Any:
        from incofl.flower.protocol import encode_reply

        return encode_reply(self.upload, 0, seconds=1.0, totals=(), tested=0)


def configs(inputs: Inputs, draw: Draw) -> None:
    text = presets()[draw(st.sampled_from(sorted(presets())))]
    path = inputs.folder / "config.toml"
    path.write_bytes(edited(text.encode(), draw(EDITS)) if draw(st.booleans()) else text.encode())
    key = st.sampled_from(sorted(make_config().flat()))
    make_config(path, [f"{draw(key)}={draw(VALUES)}" for _ in range(draw(st.integers(0, 3)))])


def config_values(inputs: Inputs, draw: Draw) -> None:
    make_config(altered(make_config().to_dict(), draw))


def devices(inputs: Inputs, draw: Draw) -> None:
    path = inputs.folder / "devices.toml"
    genuine = Path(__file__).parents[1] / "examples" / "devices.toml"
    path.write_bytes(edited(genuine.read_bytes(), draw(EDITS)))
    load_devices(path)


def data_files(inputs: Inputs, draw: Draw) -> None:
    """The cached copy of a data set, and a compressed file that may be made to unpack without end."""
    if draw(st.booleans()):
        path, genuine = inputs.folder / "copy.safetensors", inputs.folder / "genuine.safetensors"
        if not genuine.exists():
            train, test = (
                incofl.Data((torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4)), classes=4).train
                for _ in "12"
            )
            write_cache(genuine, train, test, "nowhere")
        path.write_bytes(edited(genuine.read_bytes(), draw(EDITS)))
        read_cache(path, 4)
        return
    path = inputs.folder / "labels-idx1-ubyte.gz"
    raw = struct.pack(">HBBI", 0, 8, 1, 20) + bytes(20)
    if draw(st.booleans()):
        raw += bytes(draw(st.sampled_from([1, 10**4, 10**7])))
    path.write_bytes(edited(gzip.compress(raw, 1), draw(EDITS)) if draw(st.booleans()) else gzip.compress(raw, 1))
    unpack(path, 28)
    _idx(path.with_suffix(""), (20,))


def checkpoints(inputs: Inputs, draw: Draw) -> None:
    """Damaged ones, and whole ones of somebody who knows how they are sealed."""
    path, genuine = inputs.folder / "state.safetensors", RunFolder(inputs.run).checkpoint
    if draw(st.booleans()):
        path.write_bytes(edited(genuine.read_bytes(), draw(EDITS)))
    else:
        tensors, header = read_sealed(genuine)
        name = draw(st.sampled_from(sorted(tensors)))
        new = draw(st.sampled_from(["shared/x", "private/x/y", "private/-1/y", "extra", "states/", "odd/x", name]))
        tensors[new] = tensors.pop(name).flatten()[:1]
        header = altered({key: value for key, value in header.items() if key not in ("format", "checksum")}, draw)
        try:
            write_sealed(path, tensors, header if isinstance(header, dict) else {})
        except ValueError:  # what JSON does not have
            return
    load_checkpoint(path, inputs.federation.start())


@contextmanager
def damaged_run(inputs: Inputs, draw: Draw) -> Iterator[Path]:
    """A copy of a run folder, one file of which is damaged or has other values."""
    folder, memories = inputs.folder / "damaged", sorted(RunFolder(inputs.run).memories.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(inputs.run, folder)
    names = ["config.toml", "metrics.jsonl", "environment.json", "summary.json", "partition.json"]
    names += ["checkpoint/state.safetensors", "checkpoint/previous.safetensors", "checkpoint/records.crc32"]
    names += ["snapshots/round-000001.safetensors", *(f"checkpoint/clients/{p.name}" for p in memories)]
    path = folder / draw(st.sampled_from(names))
    if path.suffix in (".json", ".jsonl") and draw(st.booleans()):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = json.dumps(altered(json.loads(lines[at]), draw))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_bytes(edited(path.read_bytes(), draw(EDITS)))
    yield folder


def report(inputs: Inputs, draw: Draw) -> None:
    from incofl.report.page import make_page

    with damaged_run(inputs, draw) as folder:
        make_page(by_seed(find_runs(folder)))


def watching(inputs: Inputs, draw: Draw) -> None:
    from incofl.report.live import state

    with damaged_run(inputs, draw) as folder:
        json.dumps(state(folder))


def analyses(inputs: Inputs, draw: Draw) -> None:
    only = draw(st.sampled_from(["coefficients", "updates"]))
    with damaged_run(inputs, draw) as folder:
        incofl.analyze(folder, only=[only])


def resumption(inputs: Inputs, draw: Draw) -> None:
    with damaged_run(inputs, draw) as folder:
        incofl.run(make_config(folder / "config.toml"), folder, resume=True, progress=False)


def uploads(inputs: Inputs, draw: Draw) -> None:
    """An upload whose values, names or shapes are others: it is accepted or rejected, and what counts is finite."""
    upload = inputs.upload
    part = draw(st.sampled_from(["update", "buffers", "extra", "smallest"]))
    table = dict(getattr(upload, part))
    kinds = ["value", "shape", "name", "missing", "type"] if table else ["name"]
    kind, name = draw(st.sampled_from(kinds)), draw(st.sampled_from(sorted(table) or ["x"]))
    number = float(draw(NUMBERS))
    if kind == "value":
        table[name] = torch.full_like(table[name], number if table[name].is_floating_point() else 2**62)
    elif kind == "shape":
        table[name] = torch.zeros(draw(st.sampled_from([(0,), (1,), (2, 2), ()])))
    elif kind == "name":
        table[draw(WORDS)] = torch.zeros(1)
    elif kind == "missing":
        del table[name]
    else:
        table[name] = table[name].to(draw(st.sampled_from([torch.float64, torch.int64, torch.bool, torch.complex64])))
    changes: dict[str, Any] = {part: table}
    field = draw(st.sampled_from(["steps", "loss", "normaliser", "examples", "client"]))
    changes[field] = draw(NUMBERS)
    stats = RoundStats()
    server = inputs.federation.start()
    for accepted in stats.validated(iter([[dataclasses.replace(upload, **changes)]]), server):
        for one in accepted:
            assert all(torch.isfinite(value).all() for value in one.update.values())
    assert len(stats.rejected) <= 1


def messages(inputs: Inputs, draw: Draw) -> None:
    """Replies, answers and orders of strangers."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from incofl.flower.app import _agreed, _facts
    from incofl.flower.protocol import Order, decode_answer, decode_order, decode_reply

    kind = draw(st.sampled_from(["reply", "answer", "order", "config"]))
    if kind == "config":
        _agreed(edited(tiny_config().to_toml().encode(), draw(EDITS)).decode(errors="replace"), {}, ())
        _facts(draw(st.text(max_size=30)))
        return
    content = (
        RecordDict({name: copy.copy(record) for name, record in inputs.reply.items()})
        if kind == "reply"
        else RecordDict()
    )
    plain = (
        {"client": 0, "level": 0, "version": 4}
        if kind == "answer"
        else {**vars(Order()), "drawn": [], "memory": [0, 0]}
    )
    name = "report" if kind == "reply" else kind
    record = ConfigRecord(dict(content[name])) if kind == "reply" else ConfigRecord(plain)
    key = draw(st.sampled_from([*sorted(record), "odd"]))
    value = draw(
        st.one_of(
            NUMBERS, WORDS, st.lists(st.integers(-5, 2**60), max_size=12), st.lists(st.text(max_size=3), max_size=3)
        )
    )
    try:
        record[key] = value
        content.pop(name, None)
        content[name] = record
        if kind == "reply" and draw(st.booleans()):
            part = draw(st.sampled_from(["update", "buffers", "extra", "smallest"]))
            arrays = dict(content[part])
            at = draw(st.sampled_from([*sorted(arrays), "odd"]))
            old = arrays.get(at, Array(torch.zeros(2).numpy()))
            shape = draw(st.sampled_from([tuple(old.shape), (0,), (2**40,), (-1,)]))
            arrays[at] = Array(
                old.dtype, shape, draw(st.sampled_from([old.stype, "pickle"])), edited(old.data, draw(EDITS))
            )
            content[part] = ArrayRecord(arrays)
    except (TypeError, ValueError, OverflowError):  # what Flower itself does not send
        return
    if kind == "reply":
        most = draw(st.sampled_from([None, 0, 40]))
        decode_reply(content, inputs.federation, inputs.federation.schedule(0, 1)[0], most_examples=most)
    elif kind == "answer":
        decode_answer(content)
    else:
        decode_order(content)


# With the share of all examples that each gets: what takes long gets less.
TARGETS: dict[str, tuple[Callable[[Inputs, Draw], None], float]] = {
    "configs": (configs, 1.0),
    "config values": (config_values, 1.0),
    "devices": (devices, 1.0),
    "data files": (data_files, 1.0),
    "checkpoints": (checkpoints, 1.0),
    "report": (report, 0.05),
    "watch": (watching, 0.5),
    "analyze": (analyses, 0.05),
    "resumption": (resumption, 0.05),
    "uploads": (uploads, 1.0),
    "messages": (messages, 1.0),
}


def fuzz(name: str, examples: int, seed: int, folder: Path) -> str:
    """Feeds so many inputs to a target; raises at the first that is not accepted or refused in one line."""
    target, share = TARGETS[name]
    inputs, slowest, refused, fed = Inputs(folder), 0.0, 0, 0
    number = max(1, round(examples * share))

    @hypothesis.seed(seed)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def feed(data: st.DataObject) -> None:
        nonlocal slowest, refused, fed
        start, fed, said = time.process_time(), fed + 1, ""
        try:
            target(inputs, data.draw)
        except IncoflError as problem:
            refused, said = refused + 1, str(problem)
        assert said.isprintable() or name not in ("messages", "uploads"), said  # else a terminal would obey it
        slowest = max(slowest, time.process_time() - start)
        assert slowest < LONGEST, f"{slowest:.0f} s"

    for genuine in (
        ("run", "upload", "reply") if name not in ("configs", "config values", "devices", "data files") else ()
    ):
        getattr(inputs, genuine)
    feed()
    return f"{name}: {fed} inputs, {refused} refused in one line, the slowest took {slowest:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--examples", type=int, default=1000, help="of each target and seed; fewer where one takes long"
    )
    parser.add_argument("--seeds", default="0:1", help="the first, and the one after the last")
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS), metavar="NAME")
    arguments = parser.parse_args()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
    first, end = map(int, arguments.seeds.split(":"))
    for seed, name in itertools.product(range(first, end), arguments.only):
        with tempfile.TemporaryDirectory() as folder:
            print(f"seed {seed}, {fuzz(name, arguments.examples, seed, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
