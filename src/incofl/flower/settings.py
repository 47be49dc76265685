"""How patient the server is, and where it writes: what concerns the fleet and not the method."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from incofl.config import Config
from incofl.errors import ConfigError
from incofl.options import options

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


@options("")
class Settings:
    """The settings of a server app; in Flower's run config with dashes, such as ``min-replies``."""

    out: str = "runs/flower"  # the run folder
    resume: bool = False  # continue the run in it, if there is one
    deadline: Annotated[float, Gt(0)] = 600.0  # seconds that a node has for a turn, after its order is sent
    wait: Annotated[float, Ge(0)] = 120.0  # seconds: for all clients at the start, for min_nodes before every round
    min_nodes: Count = 0  # number of nodes that a round needs to start; 0: the size of a cohort
    min_replies: Count = 1  # number of accepted replies that a round needs; with fewer it is repeated
    attempts: Positive = 3  # number of times that a round is tried before the run ends with an error
    window: Positive = 32  # number of turns under way, or waiting to be added up, at a time
    patience: Positive = 2  # number of deadlines that a node may miss in a row before it gets a smaller model
    poll: Annotated[float, Gt(0)] = 0.5  # seconds between two looks for a reply
    metrics_port: Count = 0  # port of an endpoint for Prometheus; 0: none
    metrics_host: str = "127.0.0.1"  # address of that endpoint, which everybody who reaches it can read
    # whether a client number belongs to the node that had it first, whose id is that of its key. Without keys leave it
    # out: a node has another id after every restart
    bound: bool = False
    # where only nodes know their examples, a node's count for at most this many times the median of all nodes
    examples_multiple: Annotated[float, Ge(1)] = 10.0
    early_bytes: Positive = 4 * 2**30  # of replies that wait on disk to be added up; beyond it at the SuperLink

    def check(self, config: Config) -> None:
        """Refuses to wait for more nodes, or more replies, than there can be."""
        nodes, replies = (config.num_clients, "the fleet (data.clients)"), (config.cohort_size, "a cohort")
        for name, (most, of) in {"min_nodes": nodes, "min_replies": replies}.items():
            if (got := getattr(self, name)) > most:
                raise ConfigError(f"{name}: got {got}, expected at most {most}, the size of {of}")


@options("node-config")
class NodeConfig:
    """What a node says of itself (``flower-supernode --node-config``), with dashes, such as ``state-dir``.

    A node without a ``level`` gets the largest one within its limits of ``memory``, ``compute`` and ``bandwidth``.
    """

    partition_id: Count | None = None  # its client number; left out, it gets the next free one
    level: Count | None = None  # the level that it wants
    memory: str | int | None = None  # for training, such as "512 MB"
    compute: str | int | None = None  # multiply-accumulates per example, such as "30 MMAC"
    bandwidth: str | int | None = None  # bytes per round, down and up together, such as "50 MB"
    state_dir: str | None = None  # a folder for what it remembers, so that it survives a restart
    data_root: str | None = None  # the folder of a built-in data set, instead of the server's data.root
    device: str | None = None  # torch device, instead of the server's engine.device
    precision: Literal["float32", "bf16"] | None = None  # instead of the server's engine.precision
    num_partitions: Count | None = None  # set by Flower's simulation, and not used


NAMES = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(Settings)}


def read_run_config(given: Mapping[str, Any], settings: Settings) -> tuple[Settings, str | None, list[str]]:
    """Settings, the config's file or preset, and overrides of its keys: all that is not a setting."""
    others = {key: value for key, value in given.items() if key != "config" and key not in NAMES}
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in others.items()]
    chosen = {NAMES[key]: value for key, value in given.items() if key in NAMES}
    return dataclasses.replace(settings, **chosen), given.get("config"), overrides
