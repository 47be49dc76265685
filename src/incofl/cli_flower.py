"""The command ``incofl flower``: a ready app for Flower, so that ``flwr run`` trains a fleet of real clients."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from incofl.config import Config, load_config
from incofl.data import find_source
from incofl.engine.build import build_method, build_model, build_splitter
from incofl.errors import ConfigError

flower_app = typer.Typer(help="Train a fleet of real clients with Flower.", rich_markup_mode=None)

PYPROJECT = """\
[project]
name = {name}
version = "1.0.0"
description = "Federated learning with clients of unequal size"
license = "Apache-2.0"
# Left empty on purpose: Flower would install what stands here at the start of every run. Install incofl[flower] into
# the environment of the SuperLink and of every SuperNode instead.
dependencies = []

[tool.flwr.app]
publisher = "incofl"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

# flwr run --run-config 'rounds=3 deadline=60' overrides what stands here, and only that: add what you want to override.
# All keys: docs/config.md and docs/flower.md of incofl.
[tool.flwr.app.config]
config = {preset}
{overrides}
# The run folder, on the machine of the SuperLink. The same command continues a run that was interrupted.
out = {out}
resume = true

# How patient the server is: seconds of a turn, seconds to wait for nodes, and how many nodes and replies a round needs.
deadline = 600
wait = 120
min-nodes = {half}
min-replies = {half}
attempts = 3
window = 32
patience = 2
poll = 0.5
metrics-port = 0
"""

SERVER_APP = '''\
"""The server: incofl's rounds; what is trained stands in pyproject.toml."""

from incofl.flower import make_server_app

app = make_server_app()
'''

CLIENT_APP = '''\
"""A node: trains the part of the model that the server sends it."""

from incofl.flower import make_client_app

app = make_client_app()
'''

README = """\
# {name}
{method} on {data}: {clients} clients of {levels} sizes, {rounds} rounds. Written by `incofl flower new`.

On this machine, as a simulation (needs `pip install 'flwr[simulation]'`):

    export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
    flwr run . local --stream --federation-config 'num-supernodes={clients} client-resources-num-cpus=1'

On a fleet, with a SuperLink that your Flower config (`flwr config list`) knows as `fleet`:

    flwr run . fleet --stream

A node says who it is and what it can bear when it is started:

    flower-supernode ... --node-config 'partition-id=0 level=2'
    flower-supernode ... --node-config 'partition-id=1 memory="512 MB" state-dir="/var/lib/incofl"'

What each level costs: `incofl plan {plan}`. The run folder is `out` in pyproject.toml; it is kept out of what Flower
packs by .gitignore. The same `flwr run` continues a run that was interrupted.
"""


@flower_app.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@flower_app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    preset: Annotated[str, typer.Option("--preset", metavar="P", help="Preset (incofl list presets).")] = "demo",
    method: Annotated[str | None, typer.Option("--method", "-m", metavar="M", help="Method.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="Model.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="D", help="Data set.")] = None,
    clients: Annotated[int, typer.Option("--clients", metavar="N", min=1, help="Nodes of the fleet.")] = 5,
) -> None:
    """Write a Flower app that trains a built-in model on a built-in data set.

    ``flwr run DIR`` works at once: as a simulation, or on a fleet of SuperNodes.
    """
    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: got a file or a folder that is not empty, expected a new or an empty one")
    chosen = {"method": method, "model.name": model, "data.name": data}
    overrides = {key: value for key, value in chosen.items() if value is not None}
    numbers = {"data.clients": clients, "cohort": clients}
    config = load_config(preset, [f"{key}={json.dumps(value)}" for key, value in (overrides | numbers).items()])
    levels = _levels(config)
    named = {"method": config.method, "rounds": config.rounds, "seed": config.seed, **numbers, **overrides}
    if find_source(config.data.name).published.files:
        named["data.root"] = str(Path(config.data.root).expanduser().resolve())
    lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in named.items())
    name = app_name(folder)
    plan = [preset, *(f"--set {key}={value}" for key, value in overrides.items())]
    files = {
        "pyproject.toml": PYPROJECT.format(
            name=json.dumps(name),
            preset=json.dumps(preset),
            overrides=lines,
            half=(clients + 1) // 2,
            out=json.dumps(str(folder.resolve() / "runs" / "first"), ensure_ascii=False),
        ),
        "server_app.py": SERVER_APP,
        "client_app.py": CLIENT_APP,
        "README.md": README.format(
            name=name,
            method=config.method,
            data=config.data.name,
            clients=clients,
            levels=levels,
            rounds=config.rounds,
            plan=" ".join(plan),
        ),
        ".gitignore": "runs/\n__pycache__/\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    typer.echo(f"wrote a Flower app to {folder}; what to do with it is in {folder / 'README.md'}")


def app_name(folder: Path) -> str:
    """A name as Flower allows it: letters, digits and hyphens, the first a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"app-{name}")[:32].rstrip("-")


def _levels(config: Config) -> int:
    """How many sizes there are; builds the model, so that what cannot be built is said now."""
    build_method(config)
    return len(build_splitter(config, build_model(config)).depths)
