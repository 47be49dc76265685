"""An endpoint for Prometheus: what a run's lines say, as gauges and counters."""

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.progress import Lines
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


class Monitor(Lines):
    """Prints a line for every round, and shows the run at a port."""

    def __init__(self, port: int) -> None:
        registry = CollectorRegistry()
        labelled = {key: (f"incofl_node_{key}", about, ["client"]) for key, about in PER_NODE.items()}
        self._run = [Gauge(f"incofl_{name}", about, registry=registry) for name, about in RUN.items()]
        self._nodes = {key: Gauge(*about, registry=registry) for key, about in labelled.items()}
        about = "first metric on the server's test set, at the last evaluation"
        self._accuracy = Gauge("incofl_accuracy", about, ["level"], registry=registry)
        self._rejected = Counter("incofl_rejected", "turns without an accepted upload", registry=registry)
        self._bytes = Counter("incofl_bytes", "bytes of accepted turns", ["direction"], registry=registry)
        try:
            self._server, _ = start_http_server(port, registry=registry)
        except OSError as problem:
            raise ConfigError(f"metrics_port: got {port}, which cannot be used ({problem.strerror})") from None

    def close(self) -> None:
        """Frees the port."""
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
        values = row["round"], row["seconds"], row["loss"], row.get("accuracy_on_nodes")
        shown = [*zip(self._run, values, strict=True)]
        accuracies = zip(self._levels, row["accuracy_by_level"] or (), strict=False)
        shown += [(self._accuracy.labels(level), accuracy) for level, accuracy in accuracies]
        for node in row.get("nodes", ()):
            shown += [(gauge.labels(node["client"]), node[key]) for key, gauge in self._nodes.items()]
        for gauge, value in shown:
            if value is not None:
                gauge.set(value)
        self._rejected.inc(len(row["rejected"]))
        for direction in ("up", "down"):
            self._bytes.labels(direction).inc(row[f"bytes_{direction}"])
