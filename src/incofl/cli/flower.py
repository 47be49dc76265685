"""The command ``incofl flower``: a ready app for Flower, so that ``flwr run`` trains a fleet of real clients."""

import json
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

import incofl
import incofl.cli.arguments as arg
from incofl.errors import ConfigError

flower_app = typer.Typer(help="Train a fleet of real clients with Flower.", rich_markup_mode=None)
flower_app.callback(invoke_without_command=True)(arg.show_help)


@flower_app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    preset: Annotated[str, typer.Option(metavar="P", help="Preset (incofl list presets).")] = "demo",
    method: arg.Method = None,
    model: arg.Model = None,
    data: Annotated[str | None, typer.Option(metavar="D", help="Data set (incofl list datasets).")] = None,
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="Nodes of the fleet.")] = 5,
) -> None:
    """Write a Flower app that trains a built-in model on a built-in data set.

    ``flwr run DIR`` works at once: as a simulation, or on a fleet of SuperNodes.
    """
    from incofl.data import find_source
    from incofl.engine.build import outline
    from incofl.models.hf import PREFIX

    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: got a file or a folder that is not empty, expected a new or an empty one")
    chosen = arg.overrides(None, method=method, model=model, data=data)
    config = incofl.load_config(preset, [*chosen, f"data.clients={clients}", f"cohort={clients}"])
    values = {"method": config.method, "rounds": config.rounds, "seed": config.seed}
    values |= {"data.clients": clients, "cohort": clients}
    values |= {key: json.loads(value) for key, _, value in (override.partition("=") for override in chosen)}
    if find_source(config.data.name).files:
        values["data.root"] = str(Path(config.data.root).expanduser().resolve())
    fields = {"name": app_name(folder), "clients": clients, "half": (clients + 1) // 2, "preset": preset}
    fields |= {"method": config.method, "data": config.data.name, "rounds": config.rounds}
    fields["overrides"] = "\n".join(f"{key} = {json.dumps(each, ensure_ascii=False)}" for key, each in values.items())
    named = [config.method, config.model.name, config.data.name, config.task.name, config.local.optimizer]
    own = sorted({name for name in named if ":" in name and not name.startswith(PREFIX)})
    fields["allowed"] = f"allowed={json.dumps(own)}" if own else ""  # a node imports nothing that only the server names
    fields["out"] = json.dumps(str(folder.resolve() / "runs" / "first"), ensure_ascii=False)
    fields["levels"] = len(outline(config).splitter.depths)  # what cannot be built is said now
    fields["plan"] = " ".join([preset, *(f"--set {override}" for override in chosen)]).replace('"', "")
    folder.mkdir(parents=True, exist_ok=True)
    for template in (resources.files("incofl.cli") / "flower_app").iterdir():
        text = Template(template.read_text(encoding="utf-8")).substitute(fields)
        (folder / template.name.removesuffix(".template")).write_text(text, encoding="utf-8")
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    typer.echo(f"wrote a Flower app to {folder}; what to do with it is in {folder / 'README.md'}")


def app_name(folder: Path) -> str:
    """Returns a name that Flower allows: letters, digits and hyphens, the first a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"app-{name}")[:32].rstrip("-")
