"""An endpoint for Prometheus: what a run's lines say, as gauges and counters."""

import functools
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.progress import Progress
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError

PER_NODE = {
    "seconds": "of its last turn",
    "cpu_seconds": "of processors in its last turn",
    "peak_memory": "bytes of its process at its peak",
    "bytes_up": "of its last reply",
    "bytes_down": "of its last order",
    "level": "that it trained last",
}


class Monitor:
    """Passes on all that it is told, and shows it at a port."""

    def __init__(self, watched: Progress, port: int) -> None:
        self._watched, self._port = watched, port
        self._registry = CollectorRegistry()
        gauge = functools.partial(Gauge, registry=self._registry)
        self._round = gauge("incofl_round", "finished rounds")
        self._seconds = gauge("incofl_round_seconds", "that the last round took")
        self._loss = gauge("incofl_train_loss", "mean over the last cohort's examples")
        self._accuracy = gauge("incofl_accuracy", "on the server's test set, at the last evaluation", ["level"])
        self._on_nodes = gauge("incofl_accuracy_on_nodes", "on examples that nodes hold out, before they train")
        self._rejected = Counter("incofl_rejected", "turns without an accepted upload", registry=self._registry)
        self._bytes = Counter("incofl_bytes", "of accepted turns", ["direction"], registry=self._registry)
        self._nodes = {key: gauge(f"incofl_node_{key}", about, ["client"]) for key, about in PER_NODE.items()}
        self._levels: list[int] = []
        self._server: Any = None

    def __enter__(self) -> "Monitor":
        try:
            self._server, _ = start_http_server(self._port, registry=self._registry)
        except OSError as problem:
            raise ConfigError(f"metrics-port: got {self._port}, which cannot be used ({problem.strerror})") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """What is known of earlier rounds."""
        self._levels = federation.levels_in_use
        self._watched.started(config, federation, rows)
        for row in rows:
            self._show(row)

    def uploaded(self, client: int) -> None:
        """Too fine to show."""
        self._watched.uploaded(client)

    def finished_round(self, row: Row) -> None:
        """One round more."""
        self._show(row)
        self._watched.finished_round(row)

    def _show(self, row: Row) -> None:
        self._round.set(row["round"])
        self._seconds.set(row["seconds"])
        if row["loss"] is not None:
            self._loss.set(row["loss"])
        for level, accuracy in zip(self._levels, row["accuracy_by_level"] or (), strict=False):
            self._accuracy.labels(level).set(accuracy)
        if "accuracy_on_nodes" in row:
            self._on_nodes.set(row["accuracy_on_nodes"])
        self._rejected.inc(len(row["rejected"]))
        for direction in ("up", "down"):
            self._bytes.labels(direction).inc(row[f"bytes_{direction}"])
        for node in row.get("nodes", ()):
            for key, gauge in self._nodes.items():
                gauge.labels(node["client"]).set(node[key])
