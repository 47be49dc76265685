"""Getting a trained model out of a run folder."""

from pathlib import Path
from typing import Any

from torch import nn

from incofl.config import load_config
from incofl.engine.build import build_model, build_splitter
from incofl.engine.checkpoint import load_checkpoint
from incofl.engine.federation import Federation
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, RunError
from incofl.models import Model
from incofl.server import Server
from incofl.split import Splitter, submodel


def load_model(folder: str | Path, level: int = -1, **objects: Any) -> nn.Module:
    """The model of a level after the last finished round of a run, ready for evaluation.

    Args:
        folder: the run folder.
        level: 0 is the smallest; -1 the largest.
        objects: the objects that the run was made from, if any: ``model``, ``data``, ``method``, ``task``.
    """
    records = RunFolder(Path(folder))
    if not records.checkpoint.exists():
        raise RunError(f"{folder}: holds no checkpoint; is it a run folder with a finished round?")
    config = load_config(records.config, **objects)
    model = build_model(config)
    splitter = build_splitter(config, model)
    server = load_checkpoint(records.checkpoint, Server(model.layout, model.initial)).server
    number = level_number(level, splitter)
    if config.buffers == "static" and model.layout.buffers:
        _check_measured(records, server, number)
    return _module(model, splitter, server, number)


def trained_module(federation: Federation, server: Server, level: int = -1) -> nn.Module:
    """The module of a level with the server's values, ready for evaluation."""
    return _module(federation.model, federation.splitter, server, level_number(level, federation.splitter))


def level_number(level: int, splitter: Splitter) -> int:
    """The number of a level, where -1 is the largest."""
    levels = len(splitter.depths)
    if not -levels <= level < levels:
        raise ConfigError(f"level: got {level}, expected 0 to {levels - 1}, or -1 for the largest")
    return level % levels


def _module(model: Model, splitter: Splitter, server: Server, level: int) -> nn.Module:
    slice_ = splitter.slice(model.layout, level, max(server.round - 1, 0))
    module = submodel(model.template, model.layout, slice_)
    module.load_state_dict(slice_.take(server.state(level)))
    return module.eval()


def _check_measured(records: RunFolder, server: Server, level: int) -> None:
    """Refuses weights whose batch-norm statistics were not measured with them."""
    row = next(row for row in records.rows() if row["round"] == server.round)
    if row["accuracy"] is None:
        raise RunError(
            f"{records.path}: round {server.round}, the last finished one, was not evaluated, so that its static "
            "batch-norm statistics were not measured; continue to a round that is, the last one for example: "
            f"incofl run --resume --out {records.path}"
        )
    if level not in server.private:
        raise RunError(
            f"{records.path}: nobody trains level {level}, so that its static batch-norm statistics were not measured; "
            f"load one of {sorted(server.private)}"
        )
