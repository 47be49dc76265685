"""An endpoint for Prometheus: what a run's lines say, as gauges and counters."""

from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.progress import Lines
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError

LEVEL, CLIENT = ("level",), ("client",)  # what a gauge is shown for each of
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "round": ("finished rounds", ()),
    "round_seconds": ("duration of the last round", ()),
    "train_loss": ("mean over the last cohort's examples", ()),
    "accuracy_on_nodes": ("first metric on examples that nodes hold out, before they train", ()),
    "accuracy": ("first metric on the server's test set, at the last evaluation", LEVEL),
    "node_seconds": ("duration of its last turn", CLIENT),
    "node_cpu_seconds": ("processor time of its last turn", CLIENT),
    "node_peak_memory": ("bytes of its process at its peak", CLIENT),
    "node_bytes_up": ("bytes of its last reply", CLIENT),
    "node_bytes_down": ("bytes of its last order", CLIENT),
    "node_level": ("level that it trained last", CLIENT),
}


class Monitor(Lines):
    """Prints a line for every round, and shows the run at a port."""

    def __init__(self, port: int) -> None:
        self._port, self._registry = port, (registry := CollectorRegistry())
        self._gauges = {name: Gauge(f"incofl_{name}", *about, registry=registry) for name, about in GAUGES.items()}
        self._rejected = Counter("incofl_rejected", "turns without an accepted upload", registry=registry)
        self._bytes = Counter("incofl_bytes", "bytes of accepted turns", ["direction"], registry=registry)

    def __enter__(self) -> Self:
        try:
            self._server, _ = start_http_server(self._port, registry=self._registry)
        except OSError as problem:
            raise ConfigError(f"metrics_port: got {self._port}, which cannot be used ({problem.strerror})") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        self._levels = federation.levels_in_use
        super().started(config, federation, rows)
        for row in rows:
            self._show(row)

    def finished_round(self, row: Row) -> None:
        self._show(row)
        super().finished_round(row)

    def _show(self, row: Row) -> None:
        self._set("round", row["round"])
        self._set("round_seconds", row["seconds"])
        self._set("train_loss", row["loss"])
        self._set("accuracy_on_nodes", row.get("accuracy_on_nodes"))
        for level, accuracy in zip(self._levels, row["accuracy_by_level"] or (), strict=False):
            self._set("accuracy", accuracy, level)
        for node in row.get("nodes", ()):
            for key in ("seconds", "cpu_seconds", "peak_memory", "bytes_up", "bytes_down", "level"):
                self._set(f"node_{key}", node[key], node["client"])
        self._rejected.inc(len(row["rejected"]))
        for direction in ("up", "down"):
            self._bytes.labels(direction).inc(row[f"bytes_{direction}"])

    def _set(self, name: str, value: Any, *of: int) -> None:
        if value is not None:
            gauge = self._gauges[name]
            (gauge.labels(*of) if of else gauge).set(value)
