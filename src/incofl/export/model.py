"""Trained levels as files that other programs run, checked against ours, with a page that says how to load them."""

import copy
import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import incofl
from incofl.config import Config, find_parts
from incofl.costs import human
from incofl.engine.build import build_data
from incofl.engine.federation import Federation
from incofl.engine.files import atomic_write
from incofl.engine.finished import open_run
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, DataError, IncoflError, RunError, nearest
from incofl.export.folding import fold_batch_norms
from incofl.export.formats import FORMATS, Format, Logits, Runner, any_batch, quiet, trace
from incofl.imports import describe
from incofl.studies.compare import markdown
from incofl.tensors import Inputs, call, map_inputs, num_bytes, num_examples, one_thread

TOLERANCE = 1e-4  # between our logits and those of a file, relative to the largest of ours where that is above 1
CHECKED = 100  # inputs on which they are compared
CALLS = 30  # of which the latency is the median


@dataclass(frozen=True)
class Exported:
    """A file, or our own model beside it: what it is and what was measured on this machine."""

    level: int
    exit: int | None
    format: str
    file: str
    bytes: int
    milliseconds: float  # of one example, median, one thread
    difference: float  # largest of the logits to ours
    batches: bool = True  # whether it takes batches of any size
    folded: int = 0  # number of batch norms that are part of the weights

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        return {
            "level": str(self.level) if self.exit is None else f"{self.level}, exit {self.exit}",
            "format": self.format,
            "file": self.file or "-",
            "size": human(self.bytes, "B"),
            "ms": f"{self.milliseconds:.2f}",
            "difference": f"{self.difference:.1e}" if self.file else "-",
            "batch": "any" if self.batches else "1",
            "norms folded": str(self.folded),
        }


def export_model(
    folder: str | Path,
    out: str | Path,
    levels: int | Sequence[int] = -1,
    formats: str | Sequence[str] = "safetensors",
    exit: int | None = None,
    **objects: Any,
) -> list[Exported]:
    """Writes levels of a run in some formats and a README.md into a folder; returns what was measured.

    Each file is read back and must give our logits on 100 inputs, those of the test set where its files are found.
    ``levels``, ``exit`` and ``objects`` are as in ``load_model``; no levels: all.
    """
    formats = [formats] if isinstance(formats, str) else formats
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"format: got {name!r}{nearest(name, FORMATS)}")
    config, federation, server = open_run(folder, -1, **objects)
    inputs, kind = example_inputs(config, federation)
    wanted = [levels] if isinstance(levels, int) else levels
    numbers = [federation.level_number(level) for level in wanted] or list(range(len(federation.splitter.depths)))
    target, made = Path(out).expanduser(), list[Exported]()
    check_folder(target, config)
    target.mkdir(parents=True, exist_ok=True)
    for level in dict.fromkeys(numbers):
        open_run(folder, level, **objects)  # refuses a level that cannot be evaluated
        model = Logits(federation.module(server, level, exit)).eval()
        ours = Exported(level, exit, "incofl", "", num_bytes(model.state_dict()), 0.0, 0.0)
        with torch.inference_mode(), one_thread():
            expected = call(model, inputs)
            if not isinstance(expected, Tensor):
                raise RunError(f"{folder}: the model returns {type(expected).__name__}, expected a tensor of logits")
            made.append(dataclasses.replace(ours, milliseconds=latency(partial(call, model), inputs)))
        stem = f"level-{level}" + (f"-exit-{exit}" if exit is not None else "")
        made += [write(FORMATS[name], model, inputs, expected, target / stem, ours) for name in formats]
    atomic_write(target / "README.md", page(config, server.round, made, inputs, kind).encode())
    return made


def check_folder(target: Path, config: Config) -> None:
    """Refuses a folder in which something else would be overwritten, or be taken for a part of this export."""
    readme = target / "README.md"
    if target.exists() and not target.is_dir():
        raise RunError(f"{target}: is a file, expected a folder for the export")
    if RunFolder(target).metrics.exists():
        raise RunError(f"{target}: is the folder of a run, expected one for the export; choose another with --out")
    if readme.exists() and _mark(config) not in readme.read_text(encoding="utf-8", errors="replace"):
        raise RunError(f"{readme}: is not of an export of this run; choose another folder with --out")


def _mark(config: Config) -> str:
    return f"Run {config.digest()[:12]}"  # in the README.md, by which an export is known


def write(format: Format, model: Logits, inputs: Inputs, expected: Tensor, stem: Path, ours: Exported) -> Exported:
    """Writes one file, reads it back, compares it with our model and measures it."""
    path = stem.with_name(stem.name + format.suffix)
    model, folded, batches = copy.deepcopy(model), 0, True
    try:
        if format.graph:
            program = trace(model, inputs, format.one)
            if folded := fold_batch_norms(model, program):
                program = trace(model, inputs, format.one)
            format.write(program, path)
            batches = any_batch(program, inputs)
        else:
            format.write(model.model, path)
    except IncoflError:
        raise
    except Exception as problem:  # exporters raise nearly anything
        raise RunError(f"{path}: {format.name} cannot hold this model: {describe(problem)[:300]}") from problem
    with torch.inference_mode(), one_thread(), quiet():
        run = format.read(path, model.model)
        count = num_examples(inputs)
        parts = [slice(None)] if batches else [slice(i, i + 1) for i in range(count)]
        got = torch.cat([run(map_inputs(itemgetter(part), inputs)) for part in parts])
        milliseconds = latency(run, inputs)
    difference = float((got - expected).abs().max())
    if got.shape != expected.shape or not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        path.unlink()
        raise RunError(f"{path}: its logits differ from ours by up to {difference:.1e}, expected at most {TOLERANCE:g}")
    return dataclasses.replace(
        ours,
        format=format.name,
        file=path.name,
        bytes=path.stat().st_size,
        milliseconds=milliseconds,
        difference=difference,
        batches=batches,
        folded=folded,
    )


def example_inputs(config: Config, federation: Federation) -> tuple[Inputs, str]:
    """Inputs on which models are compared, and what they are: test examples, or drawn ones if there are no files."""
    try:
        data = build_data(config)
    except DataError:
        one, vocabulary = federation.model.inputs, find_parts(config).source.vocabulary
        if not isinstance(one, Tensor):
            raise
        draw = torch.Generator().manual_seed(0)
        shape = (CHECKED, *one.shape)
        if one.is_floating_point():
            return torch.randn(shape, generator=draw), "random inputs, for the data set was not found"
        return torch.randint(vocabulary, shape, generator=draw), "random tokens, for the data set was not found"
    examples = data.test if len(data.test) else data.train
    few = examples.pick(slice(0, CHECKED))
    return data.pipeline.test(few.x), "examples of the data set"


def latency(run: Runner, inputs: Inputs) -> float:
    """The median time of one example in milliseconds, on one thread."""
    one, times = map_inputs(lambda x: x[:1], inputs), []
    for _ in range(CALLS):
        start = time.perf_counter()
        run(one)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def table(made: Sequence[Exported]) -> list[list[str]]:
    """What was exported, headings first."""
    rows = [each.cells() for each in made]
    return [list(rows[0]), *(list(row.values()) for row in rows)]


CAPTION = "ms: one example on one thread of this machine, median; difference: of the logits to ours, on"


def page(config: Config, round: int, made: Sequence[Exported], inputs: Inputs, kind: str) -> str:
    """The README.md of an export."""
    source = find_parts(config).source.view(config.data.side)
    shapes = map_inputs(lambda x: f"{str(x.dtype)[6:]} (N, {', '.join(map(str, x.shape[1:]))})", inputs)
    names = f"; classes: {', '.join(source.names)}" if source.names else ""
    arguments = ("x", "{'input': x}", "[x]")  # as they are called, by name, and as a list
    if isinstance(inputs, tuple):
        arguments = ("*x", "{f'input_{i}': each for i, each in enumerate(x)}", "list(x)")
    elif isinstance(inputs, dict):
        arguments = ("**x", "x", "list(x.values())")
    text = (
        f"# {config.model.name}, trained by {config.method} on {config.data.name}\n\n"
        f"Exported by incofl {incofl.__version__} after {round} rounds. {_mark(config)}.\n\n"
        f"- Input `x`: {shapes}, made from stored examples: {source.pipeline.formula}.\n"
        f"- Output: logits{names}.\n\n{markdown(table(made))}\n{CAPTION} {num_examples(inputs)} {kind}.\n"
    )
    for each in {each.format: each for each in made if each.file}.values():
        format = FORMATS[each.format]
        code = format.usage.replace("FILE", each.file)
        for word, value in zip(("CALLED", "NAMED", "LISTED"), arguments, strict=True):
            code = code.replace(word, value)
        text += f"\n## {format.name}\nNeeds `{format.package}`.\n\n```python\n{code}\n```\n"
    return text
