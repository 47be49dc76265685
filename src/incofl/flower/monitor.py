"""An endpoint for Prometheus: what a run's lines say, as gauges and counters."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.progress import Progress
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError

RUN = {
    "round": "finished rounds",
    "round_seconds": "duration of the last round",
    "train_loss": "mean over the last cohort's examples",
    "accuracy_on_nodes": "first metric on examples that nodes hold out, before they train",
}
PER_NODE = {
    "seconds": "duration of its last turn",
    "cpu_seconds": "processor time of its last turn",
    "peak_memory": "bytes of its process at its peak",
    "bytes_up": "bytes of its last reply",
    "bytes_down": "bytes of its last order",
    "level": "level that it trained last",
}


class Monitor:
    """Passes on all events, and shows them at a port."""

    def __init__(self, watched: Progress, port: int) -> None:
        self._watched, self._port = watched, port
        self._registry = registry = CollectorRegistry()
        self._run = {name: Gauge(f"incofl_{name}", about, registry=registry) for name, about in RUN.items()}
        self._nodes = {
            key: Gauge(f"incofl_node_{key}", about, ["client"], registry=registry) for key, about in PER_NODE.items()
        }
        about = "first metric on the server's test set, at the last evaluation"
        self._accuracy = Gauge("incofl_accuracy", about, ["level"], registry=registry)
        self._rejected = Counter("incofl_rejected", "turns without an accepted upload", registry=registry)
        self._bytes = Counter("incofl_bytes", "bytes of accepted turns", ["direction"], registry=registry)
        self._levels: list[int] = []
        self._server: Any = None

    def __enter__(self) -> "Monitor":
        try:
            self._server, _ = start_http_server(self._port, registry=self._registry)
        except OSError as problem:
            raise ConfigError(f"metrics_port: got {self._port}, which cannot be used ({problem.strerror})") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        """Shows earlier rounds."""
        self._levels = federation.levels_in_use
        self._watched.started(config, federation, rows)
        for row in rows:
            self._show(row)

    def uploaded(self, client: int) -> None:
        """Passes on the event: it is too fine to show."""
        self._watched.uploaded(client)

    def finished_round(self, row: Row) -> None:
        """Shows one more round."""
        self._show(row)
        self._watched.finished_round(row)

    def _show(self, row: Row) -> None:
        values = row["round"], row["seconds"], row["loss"], row.get("accuracy_on_nodes")
        for gauge, value in zip(self._run.values(), values, strict=True):
            if value is not None:
                gauge.set(value)
        for level, accuracy in zip(self._levels, row["accuracy_by_level"] or (), strict=False):
            if accuracy is not None:
                self._accuracy.labels(level).set(accuracy)
        self._rejected.inc(len(row["rejected"]))
        for direction in ("up", "down"):
            self._bytes.labels(direction).inc(row[f"bytes_{direction}"])
        for node in row.get("nodes", ()):
            for key, gauge in self._nodes.items():
                gauge.labels(node["client"]).set(node[key])
