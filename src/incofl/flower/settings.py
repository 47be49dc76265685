"""How patient the server is, and where it writes: what concerns the fleet and not the method."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt

from incofl.config import Config
from incofl.errors import ConfigError
from incofl.options import from_table, options

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


@options("")
class Settings:
    """The settings of a server app; in Flower's run config with dashes, such as ``min-replies``.

    Attributes:
        out: the run folder.
        resume: continue the run in it, if there is one.
        deadline: seconds that a node has for a turn, from the moment its order is sent.
        wait: seconds to wait for nodes: for all clients at the start, for ``min_nodes`` before every round.
        min_nodes: number of nodes that a round needs to start; 0: the size of a cohort.
        min_replies: number of accepted replies that a round needs; with fewer it is repeated.
        attempts: number of times that a round is tried before the run ends with an error; finished rounds are saved.
        window: number of turns that are under way, or wait to be added up, at a time; bounds the SuperLink's memory.
        patience: number of deadlines that a node may miss in a row before it gets a smaller model.
        poll: seconds between two looks for a reply.
        metrics_port: port of an endpoint for Prometheus; 0: none.
    """

    out: str = "runs/flower"
    resume: bool = False
    deadline: Annotated[float, Gt(0)] = 600.0
    wait: Annotated[float, Ge(0)] = 120.0
    min_nodes: Count = 0
    min_replies: Count = 1
    attempts: Positive = 3
    window: Positive = 32
    patience: Positive = 2
    poll: Annotated[float, Gt(0)] = 0.5
    metrics_port: Count = 0

    def check(self, config: Config) -> None:
        """Refuses to wait for more nodes, or more replies, than there can be."""
        for name, most, of in (
            ("min_nodes", config.num_clients, "the fleet (data.clients)"),
            ("min_replies", config.cohort_size, "a cohort"),
        ):
            if (got := getattr(self, name)) > most:
                raise ConfigError(f"{name}: got {got}, expected at most {most}, the size of {of}")


@options("node-config")
class NodeConfig:
    """What a node says of itself (``flower-supernode --node-config``), with dashes, such as ``state-dir``.

    Attributes:
        partition_id: its client number; left out, it gets the next free one.
        level: the level that it wants; left out, the largest model within its limits.
        memory: limit of the memory for training, such as ``"512 MB"``.
        compute: limit of the multiply-accumulates per example, such as ``"30 MMAC"``.
        bandwidth: limit of the bytes per round, down and up together, such as ``"50 MB"``.
        state_dir: a folder for what it remembers, so that it survives a restart.
        data_root: the folder of a built-in data set, instead of the server's ``data.root``.
        device: torch device, instead of the server's ``engine.device``.
        num_partitions: set by Flower's simulation, and not used.
    """

    partition_id: Count | None = None
    level: Count | None = None
    memory: str | int | None = None
    compute: str | int | None = None
    bandwidth: str | int | None = None
    state_dir: str | None = None
    data_root: str | None = None
    device: str | None = None
    num_partitions: Count | None = None


def read_node_config(given: Mapping[str, Any], strict: bool) -> NodeConfig:
    """The config of a node; ``strict``: refuses unknown keys."""
    known = {field.name for field in dataclasses.fields(NodeConfig)}
    table = {key.replace("-", "_"): value for key, value in given.items()}
    return from_table(NodeConfig, {k: v for k, v in table.items() if strict or k in known}, "node-config")


NAMES = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(Settings)}


def read_run_config(given: Mapping[str, Any], settings: Settings) -> tuple[Settings, str | None, list[str]]:
    """Settings, the config's file or preset, and overrides of its keys, from Flower's run config.

    All that is not a setting is a key of the config: ``rounds``, ``data.alpha``.
    """
    config = given.get("config")
    others = {key: value for key, value in given.items() if key != "config" and key not in NAMES}
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in others.items()]
    chosen = {NAMES[key]: value for key, value in given.items() if key in NAMES}
    return dataclasses.replace(settings, **chosen), None if config is None else str(config), overrides
