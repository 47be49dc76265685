"""An endpoint for Prometheus: what a run's lines say, as gauges and counters."""

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.progress import Lines
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError

RUN = {  # by key of a row, the gauge's name and what it says
    "round": ("round", "finished rounds"),
    "seconds": ("round_seconds", "duration of the last round"),
    "loss": ("train_loss", "mean over the last cohort's examples"),
    "accuracy_on_nodes": ("accuracy_on_nodes", "first metric on examples that nodes hold out, before they train"),
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

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        registry, tested = CollectorRegistry(), "first metric on the server's test set, at the last evaluation"
        self._run = {key: Gauge(f"incofl_{name}", about, registry=registry) for key, (name, about) in RUN.items()}
        of_nodes = {key: (f"incofl_node_{key}", about) for key, about in PER_NODE.items()}
        self._nodes = {key: Gauge(*named, ["client"], registry=registry) for key, named in of_nodes.items()}
        self._accuracy = Gauge("incofl_accuracy", tested, ["level"], registry=registry)
        self._rejected = Counter("incofl_rejected", "turns without an accepted upload", registry=registry)
        self._bytes = Counter("incofl_bytes", "bytes of accepted turns", ["direction"], registry=registry)
        try:
            self._server, _ = start_http_server(port, host, registry)
        except OSError as problem:
            where = f"metrics_port: got {port} at {host} (metrics_host)"
            raise ConfigError(f"{where}, which cannot be used ({problem.strerror})") from None

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
        accuracies = zip(self._levels, row["accuracy_by_level"] or (), strict=False)
        shown = [(gauge, row.get(key)) for key, gauge in self._run.items()]
        shown += [(self._accuracy.labels(level), accuracy) for level, accuracy in accuracies]
        for node in row.get("nodes", ()):
            shown += [(gauge.labels(node["client"]), node[key]) for key, gauge in self._nodes.items()]
        for gauge, value in shown:
            if value is not None:
                gauge.set(value)
        self._rejected.inc(len(row["rejected"]))
        for direction in ("up", "down"):
            self._bytes.labels(direction).inc(row[f"bytes_{direction}"])
