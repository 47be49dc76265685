"""The command ``incofl data``: what data sets there are, what is in them, and whether their files are sound."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from incofl.config import Config, load_config
from incofl.data import DATASETS, Dataset, Source, find_source
from incofl.data.verify import verify as check
from incofl.display import make_console
from incofl.engine.build import build_data, build_partition
from incofl.errors import ConfigError, DataError

data_app = typer.Typer(help="Look at data sets, fetch them, check their files.", rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A data set (incofl data list).")]
RootOption = Annotated[Path, typer.Option("--root", metavar="DIR", help="The folder that holds the files (data.root).")]
ROOT = Path("data")
FEW = 3  # texts that are shown
MOST_SIZES = 10_000  # clients whose sizes are looked at: a virtual population has no end


@data_app.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data_app.command("list")
def list_(root: RootOption = ROOT) -> None:
    """List the data sets, and which of them are found in DIR."""
    table = _table("data set", "training", "test", "files", "what")
    for name, source in DATASETS.items():
        sizes = [f"{sum(counts):,}" if counts else "-" for counts in (source.published.train, source.published.test)]
        table.add_row(name, *sizes, _presence(source, root.expanduser()), source.summary)
    make_console().print(table)


@data_app.command()
def show(
    name: NameArgument,
    root: RootOption = ROOT,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="A config key, e.g. data.alpha=0.1; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Draw samples and partition into this PNG file.")
    ] = None,
) -> None:
    """Show what is in a data set, and who would hold what.

    Sizes, classes, the pipeline, and the division among clients, which is that of a run with the same config keys.
    """
    source = find_source(name)
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--out: got {str(out)!r}, expected a file that ends in .png, .svg or .pdf")
    place = [f"data.name={json.dumps(name)}", f"data.root={json.dumps(str(root))}"]
    config = load_config(None, [*place, *(set_ or [])])
    data = build_data(config)
    partition = build_partition(config, data)
    names = source.published.names or tuple(map(str, range(data.classes)))
    console = make_console()
    shape = " x ".join(map(str, source.view(config.data.side).shape))
    console.print(f"{name}: {len(data.train):,} training and {len(data.test):,} test examples, {data.classes} classes")
    console.print(f"a model sees {shape}; pipeline: {_pipeline(data.pipeline)}", soft_wrap=True)
    if data.train.y.dim() == 1:
        console.print(_classes(data, names))
    for text in data.train.x[:FEW] if source.decode is not None else ():
        assert source.decode is not None
        console.print(f"  {source.decode(text)!r}", soft_wrap=True)
    division = _division(config, partition)
    console.print(division, soft_wrap=True)
    if out is not None:
        from incofl.data.pictures import draw  # matplotlib takes its time

        out.expanduser().parent.mkdir(parents=True, exist_ok=True)
        draw(data, partition, names, f"{name}: {division}").savefig(out.expanduser(), dpi=110)
        console.print(f"picture in {out}", soft_wrap=True)


@data_app.command()
def fetch(name: NameArgument, root: RootOption = ROOT) -> None:
    """Fetch a data set from the Hugging Face Hub.

    It is written into DIR in its original format. Needs the extra hub (pip install 'incofl[hub]'). Runs themselves
    never load anything over the network.
    """
    from incofl.data.hub import fetch as fetch_from_hub

    if not find_source(name).published.files:
        typer.echo(f"{name} is embedded: there is nothing to fetch")
        return
    for path in fetch_from_hub(name, root.expanduser(), lambda address: typer.echo(f"fetching {address}")):
        typer.echo(f"wrote {path}")


@data_app.command()
def verify(name: NameArgument, root: RootOption = ROOT) -> None:
    """Check that a data set is what was published.

    Reads everything, and compares sizes, class counts and checksums.
    """
    checks = check(name, root.expanduser())
    table = _table("what", "verdict", "found")
    for entry in checks:
        table.add_row(entry.what, entry.verdict, entry.note)
    make_console().print(table)
    wrong = [entry.what for entry in checks if entry.verdict == "differs"]
    if wrong:
        raise DataError(f"{name}: not as published: {', '.join(wrong)}; fetch it again unless you changed it yourself")


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("training", "test", "class") else "left")
    return table


def _presence(source: Source, root: Path) -> str:
    if not source.published.files:
        return "embedded"
    return "found" if source.published.found(root) else "not found"


def _classes(data: Dataset, names: Sequence[str]) -> Table:
    table = _table("class", "name", "training", "test")
    counts = [torch.bincount(part.y, minlength=data.classes).tolist() for part in (data.train, data.test)]
    for label, (train, test) in enumerate(zip(*counts, strict=True)):
        table.add_row(str(label), names[label], f"{train:,}", f"{test:,}")
    return table


def _pipeline(pipeline: Any) -> str:
    """The fields that say something: those that differ from their defaults."""
    fields = {f.name: (getattr(pipeline, f.name), f.default) for f in dataclasses.fields(pipeline)}
    said = [f"{name} {_plain(value)}".strip() for name, (value, default) in fields.items() if value != default]
    return ", ".join(said) or "as it is"


def _plain(value: object) -> str:
    if value is True:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _division(config: Config, partition: Sequence[Tensor]) -> str:
    sizes = [len(own) for own in partition[:MOST_SIZES]]
    skew = f" alpha {config.data.alpha:g}" if config.data.partition in ("dirichlet", "virtual") else ""
    return (
        f"{config.data.partition}{skew}, {len(partition):,} clients with {min(sizes):,} to {max(sizes):,} examples, "
        f"median {statistics.median(sizes):,g}, seed {config.seed}"
    )
