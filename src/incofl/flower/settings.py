"""How patient the server is, and where it writes: what concerns the fleet and not the method."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from incofl.config import Config
from incofl.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Of a server app; in Flower's run config with dashes, such as ``min-replies``.

    Attributes:
        out: the run folder.
        resume: continue the run in it, if there is one.
        deadline: seconds that a node has for a turn, from the moment its order is sent.
        wait: seconds to wait for nodes: for all clients at the start, for ``min_nodes`` before every round.
        min_nodes: nodes without which no round is begun; 0: as many as a cohort has.
        min_replies: accepted replies without which a round does not count, and is repeated.
        attempts: at a round, before the run ends with an error; finished rounds are saved.
        window: turns under way at a time, or done and not added up yet: what bounds the memory of the SuperLink.
        patience: deadlines that a node may miss in a row before it gets a smaller model.
        poll: seconds between two looks for a reply.
        metrics_port: port of an endpoint for Prometheus; 0: none.
    """

    out: str = "runs/flower"
    resume: bool = False
    deadline: float = 600.0
    wait: float = 120.0
    min_nodes: int = 0
    min_replies: int = 1
    attempts: int = 3
    window: int = 32
    patience: int = 2
    poll: float = 0.5
    metrics_port: int = 0

    def __post_init__(self) -> None:
        counts = {"min_nodes": 0, "min_replies": 0, "attempts": 1, "window": 1, "patience": 1}
        for name, least in {**counts, "wait": 0, "metrics_port": 0}.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name.replace('_', '-')}: got {getattr(self, name)}, expected at least {least}")
        for name in ("deadline", "poll"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected a number > 0")

    def check(self, config: Config) -> None:
        """Refuses to wait for more nodes, or more replies, than there can be."""
        for name, most, of in (
            ("min_nodes", config.data.clients, "the fleet (data.clients)"),
            ("min_replies", config.cohort_size, "a cohort"),
        ):
            if getattr(self, name) > most:
                key = name.replace("_", "-")
                raise ConfigError(f"{key}: got {getattr(self, name)}, expected at most {most}, the size of {of}")


NAMES = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(Settings)}


def read_run_config(given: Mapping[str, Any], settings: Settings) -> tuple[Settings, str | None, list[str]]:
    """Settings, the config's file or preset, and overrides of its keys, from Flower's run config.

    Whatever is no setting is a key of the config: ``rounds``, ``data.alpha``.
    """
    chosen: dict[str, Any] = {}
    overrides: list[str] = []
    config = None
    hints = typing.get_type_hints(Settings)
    for key, value in given.items():
        if key == "config":
            config = str(value)
        elif key in NAMES:
            kind = hints[NAMES[key]]
            if isinstance(value, bool) != (kind is bool) or (kind is int and not isinstance(value, int)):
                raise ConfigError(f"{key}: got {value!r}, expected a {kind.__name__}")
            try:
                chosen[NAMES[key]] = kind(value)
            except ValueError:
                raise ConfigError(f"{key}: got {value!r}, expected a {kind.__name__}") from None
        else:
            overrides.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return dataclasses.replace(settings, **chosen), config, overrides
