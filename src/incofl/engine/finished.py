"""Finished runs, and others up to their last finished round: their models, from the run folder."""

from pathlib import Path
from typing import Any

from torch import nn

from incofl.config import Config, make_config
from incofl.engine.build import outline
from incofl.engine.checkpoint import load_checkpoint
from incofl.engine.federation import Federation
from incofl.engine.run_folder import RunFolder
from incofl.errors import RunError
from incofl.server import Server


def load_model(folder: str | Path, level: int = -1, exit: int | None = None, **objects: Any) -> nn.Module:
    """The model of a level after the last finished round of a run, ready for evaluation; -1 is the largest.

    Of a model with early exits, ``exit`` is the one at which it ends: 0 is the first, -1 the last; left out, the model
    is as it was evaluated.
    ``objects`` are those that the run was made from, if any: ``model``, ``data``, ``method``, ``task``.
    """
    _, federation, server = open_run(folder, level, **objects)
    return federation.module(server, level, exit)


def open_run(folder: str | Path, level: int, **objects: Any) -> tuple[Config, Federation, Server]:
    """The config, federation and server of a run after its last finished round, of which a level can be evaluated."""
    records = RunFolder(Path(folder))
    if not records.checkpoint.exists():
        raise RunError(f"{folder}: holds no checkpoint; is it a run folder with a finished round?")
    config = make_config(records.config, **objects)
    federation = outline(config)
    server = load_checkpoint(records.checkpoint, federation.start()).server
    if config.buffers == "static" and server.layout.buffers:
        _check_measured(records, server, federation.level_number(level))
    return config, federation, server


def _check_measured(records: RunFolder, server: Server, level: int) -> None:
    """Refuses weights whose batch-norm statistics were not measured with them."""
    row = next(row for row in records.rows() if row["round"] == server.round)
    problem = "so that its static batch-norm statistics were not measured"
    if row["accuracy"] is None:
        hint = f"continue to a round that is, the last one for example: incofl run --resume --out {records.path}"
        last = f"round {server.round}, the last finished one, was not evaluated"
        raise RunError(f"{records.path}: {last}, {problem}; {hint}")
    if level not in server.private:
        hint = f"load one of {sorted(server.private)}"
        raise RunError(f"{records.path}: nobody trains level {level}, {problem}; {hint}")
