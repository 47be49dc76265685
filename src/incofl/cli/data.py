"""The command ``incofl data``: lists, shows, fetches and verifies data sets."""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer

import incofl
import incofl.cli.arguments as arg
from incofl.errors import ConfigError, DataError, needs_extra

data_app = typer.Typer(help="Look at data sets, fetch them, check their files.", rich_markup_mode=None)
data_app.callback(invoke_without_command=True)(arg.show_help)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set (incofl data list).")]
Root = Annotated[Path, typer.Option(metavar="DIR", help="The folder that holds the files (data.root).")]
ROOT = Path("data")
FEW = 3  # texts that are shown
MOST_SIZES = 10_000  # clients whose sizes are looked at: a virtual population has no end


@data_app.command("list")
def list_(root: Root = ROOT) -> None:
    """List the data sets, and which of them are found in DIR."""
    from incofl.cli.display import print_table
    from incofl.data import DATASETS

    lines = [["data set", "training", "test", "files", "what"]]
    for name, source in DATASETS.items():
        sizes = [f"{sum(counts):,}" if counts else "-" for counts in (source.train_counts, source.test_counts)]
        presence = "found" if source.found(root.expanduser()) else "not found"
        lines.append([name, *sizes, presence if source.files else "embedded", source.summary])
    print_table(lines)


@data_app.command()
def show(
    name: Name,
    root: Root = ROOT,
    set_: arg.Set = None,
    out: Annotated[Path | None, arg.out("FILE", "Draw samples and partition into this PNG file.")] = None,
) -> None:
    """Show what is in a data set, and which client would hold what.

    Sizes, classes, the pipeline, and the division among clients, which is that of a run with the same config keys.
    """
    from incofl.cli.display import print_table
    from incofl.data import find_source
    from incofl.data.texts import decode
    from incofl.engine.build import build_data, build_partition

    source = find_source(name)
    if out is not None:
        if out.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--out: got {str(out)!r}, expected a file that ends in .png, .svg or .pdf")
        with needs_extra("analysis", "--out"):
            from incofl.data.pictures import draw
    config = incofl.load_config(None, [f"data.root={json.dumps(str(root))}", *arg.overrides(set_, data=name)])
    data = build_data(config)
    partition = build_partition(config, data)
    typer.echo(f"{name}: {len(data.train):,} training and {len(data.test):,} test examples, {data.classes} classes")
    parts = list(data.seen_and_unseen(data.test).values())
    if data.unseen_clients is not None:
        people = f"{len(data.unseen_clients)} people or devices without training examples"
        typer.echo(f"of the test examples, {len(parts[-1]):,} are of {people}")
    shape, kind = " x ".join(map(str, source.view(config.data.side).shape)), type(data.pipeline)
    changed = [f"{key}={value}" for key, value in vars(data.pipeline).items() if value != getattr(kind, key, None)]
    typer.echo(f"a model sees {shape}; pipeline: {kind.__name__}({', '.join(changed)})")
    names = source.names or tuple(map(str, range(source.classes)))
    if data.train.y.dim() == 1:
        lines = [["class", "name", "training", "test"]]
        for label, named in enumerate(names):
            counts = [f"{int((part.y == label).sum()):,}" for part in (data.train, data.test)]
            lines.append([str(label), named, *counts])
        print_table(lines)
    for text in data.train.x[:FEW] if source.sequence else ():
        typer.echo(f"  {decode(text)!r}")
    sizes = [len(own) for own in partition[:MOST_SIZES]]
    skew = f" alpha {config.data.alpha:g}" if config.data.partition in ("dirichlet", "virtual") else ""
    held = f"{min(sizes):,} to {max(sizes):,} examples, median {statistics.median(sizes):,g}"
    division = f"{config.data.partition}{skew}, {len(partition):,} clients with {held}, seed {config.seed}"
    typer.echo(division)
    if out is not None:
        out.expanduser().parent.mkdir(parents=True, exist_ok=True)
        draw(data, partition, names, f"{name}: {division}").savefig(out.expanduser(), dpi=110)
        typer.echo(f"picture in {out}")


@data_app.command()
def fetch(name: Name, root: Root = ROOT) -> None:
    """Fetch a data set from the Hugging Face Hub.

    It is kept in DIR as NAME.safetensors. Needs the extra hub (pip install 'incofl[hub]'). Runs themselves never load
    anything over the network.
    """
    from incofl.data import find_source, provenance

    if not find_source(name).files:
        typer.echo(f"{name} is embedded: there is nothing to fetch")
    else:
        path = provenance.fetch(name, root.expanduser(), lambda address: typer.echo(f"fetching {address}"))
        typer.echo(f"wrote {path}")


@data_app.command()
def verify(name: Name, root: Root = ROOT) -> None:
    """Check that a data set is what was published: read everything, compare sizes, class counts and checksums."""
    from incofl.cli.display import print_table
    from incofl.data import provenance

    checks = provenance.verify(name, root.expanduser())
    print_table([["what", "verdict", "found"], *checks])
    if wrong := [check.what for check in checks if check.verdict == "differs"]:
        raise DataError(f"{name}: not as published: {', '.join(wrong)}; fetch it again unless you changed it yourself")


@data_app.command()
def words(
    name: Name,
    root: Root = ROOT,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Number of words.")] = 8190,
    out: Annotated[Path, arg.out("FILE", "Write them into this file.")] = Path("words.txt"),
) -> None:
    """Write the most frequent words of a data set's training texts into a file, for data.tokenizer.

    A model that is pretrained on one data set and adapted to another needs the same words for both.
    """
    from incofl.data import find_source
    from incofl.data.texts import list_words

    found = list_words(find_source(name), root.expanduser(), count)
    out.expanduser().write_text("".join(f"{word}\n" for word in found), encoding="utf-8")
    typer.echo(f"wrote {len(found):,} words into {out}")
