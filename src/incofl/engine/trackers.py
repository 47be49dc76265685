"""Trackers of experiments, by name: each finished round is written to TensorBoard, Weights & Biases or MLflow."""

import hashlib
import importlib.util
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from incofl.config import Config
from incofl.engine.federation import Federation
from incofl.engine.files import read_json, write_json
from incofl.engine.progress import Progress
from incofl.engine.run_folder import Row
from incofl.errors import ConfigError

PROJECT = "incofl"  # the project or experiment, unless the tracker's own environment variable says another


class Tracker(Progress):
    """Writes the numbers of each finished round by their tags.

    A resumed run continues where it was: rounds before that the tracker does not have are written, too.
    """

    package: str

    def __init__(self, name: str, folder: Path) -> None:
        if importlib.util.find_spec(self.package) is None:
            want = f"expected the package {self.package}; pip install 'incofl[{name}]'"
            raise ConfigError(f"record.trackers: got {name!r}, {want}")
        self._folder = folder

    def started(self, config: Config, federation: Federation, rows: list[Row]) -> None:
        self._levels = federation.levels_in_use
        written = self.open(config, len(rows))
        for row in rows[written:]:
            self.finished_round(row)

    def finished_round(self, row: Row) -> None:
        self.write(row["round"], dict(scalars(row, self._levels)))

    @abstractmethod
    def open(self, config: Config, rounds: int) -> int:
        """Opens or continues the record of a run that has some rounds; returns how many of them it has already."""

    @abstractmethod
    def write(self, round: int, values: dict[str, float]) -> None:
        """Writes the numbers of a round."""


class TensorBoard(Tracker):
    """Event files: ``tensorboard --logdir RUN/tensorboard``. Events of rounds that are computed again are purged."""

    package = "tensorboard"

    def open(self, config: Config, rounds: int) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder / "tensorboard"
        begun = any(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=rounds + 1 if begun else None)
        return rounds if begun else 0

    def write(self, round: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases, with ``WANDB_MODE=offline`` in ``RUN/wandb`` for ``wandb sync``."""

    package = "wandb"

    def open(self, config: Config, rounds: int) -> int:
        import wandb

        place = self._folder.resolve()
        identity = hashlib.blake2b(f"{place} {config.digest()}".encode(), digest_size=8).hexdigest()
        begun = (place / "wandb").exists()
        if begun:
            time.sleep(1)  # files are named by the second: one that is resumed at once needs others
        settings: Any = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            id=identity, name=place.name, dir=str(place), config=config.flat(), resume="allow", settings=settings
        )
        return rounds if begun else 0

    def write(self, round: int, values: dict[str, float]) -> None:
        self._run.log(values, step=round)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says, a folder ``file:...`` or a server."""

    package = "mlflow"

    def open(self, config: Config, rounds: int) -> int:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client, record = Metric, MlflowClient(), self._folder / "mlflow.json"
        if begun := record.exists():
            self._run = str(read_json(record, "delete it, and MLflow gets a new run").get("run"))
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            self._run = self._client.create_run(experiment, run_name=self._folder.resolve().name).info.run_id
            parameters = [Param(key, str(value)[:500]) for key, value in config.flat().items()]
            for start in range(0, len(parameters), 100):  # it takes no more at once
                self._client.log_batch(self._run, params=parameters[start : start + 100])
            write_json(record, {"run": self._run})
        self._client.update_run(self._run, status="RUNNING")
        return rounds if begun else 0

    def write(self, round: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [self._metric(tag, value, now, round) for tag, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_trackers(config: Config, folder: Path) -> list[Progress]:
    """The trackers that a config names, each in the run folder."""
    names = [*config.record.trackers, *(["tensorboard"] if config.record.tensorboard else [])]
    return [TRACKERS[name](name, folder) for name in dict.fromkeys(names)]


def scalars(row: Row, levels: Sequence[int]) -> Iterator[tuple[str, float]]:
    """What trackers show of a round: each number by its tag."""
    of_levels = zip(levels, row["accuracy_by_level"] or (), strict=False)  # none in a round without evaluation
    named = {
        "accuracy/mean": row["accuracy"],
        **{f"accuracy/level_{level}": value for level, value in of_levels},
        "loss/train": row["loss"],
        "loss/test": row["test_loss"],
        **{f"round/{key}": row[key] for key in ("bytes_up", "bytes_down", "seconds")},
        "round/rejected": len(row["rejected"]),
    }
    for tensor, coefficients in (row.get("inco") or {}).items():
        named |= {f"inco_{key}/{tensor}": value for key, value in coefficients.items()}
    return ((tag, float(value)) for tag, value in named.items() if value is not None)
