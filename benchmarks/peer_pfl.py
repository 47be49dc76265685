"""The federation of peers.py in Apple's pfl: its backend, its training loop, its statistics.

pfl runs in parallel by torch.distributed: every rank trains its share of the cohort in its own process, sums up, and
one all-reduce (gloo on CPUs) gives every rank the total, with which each moves its own copy of the server. The ranks
are started by torchrun (see peers.py). Nobody takes over work from a rank that is late: the share of each is settled
before the round, here by pfl's own balancing rule with the exact cost of each job. Each rank sums before all do, so the
floats are rounded in another order than incofl's.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from peer_rounds import Played
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import FederatedAlgorithm
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDatasetBase
from pfl.hyperparam.base import AlgorithmHyperParams, ModelHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.model.base import Model
from pfl.stats import MappedVectorStatistics

from incofl.aggregate import CoveredMean
from incofl.config import Config
from incofl.engine.federation import Federation, Job
from incofl.engine.worker import Worker
from incofl.server import Changes, Server
from incofl.tensors import Tensors


class Cohorts(FederatedDatasetBase):
    """The jobs of each round that are this rank's share."""

    def __init__(self, federation: Federation, first_round: int) -> None:
        super().__init__()
        self._federation = federation
        self._round = first_round

    def __next__(self) -> tuple[Dataset, int]:
        raise NotImplementedError

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[Dataset, int]]:
        """The users of this rank, largest first: each goes to the rank with the least to do, as pfl's sampler does."""
        distributed = pytorch_ops.distributed
        jobs = self._federation.schedule(self._round, cohort_size)  # sorted by cost
        self._round += 1
        load = np.zeros(distributed.world_size)
        for job in jobs:
            rank = int(np.argmin(load))
            examples = self._federation.partition[job.client]
            load[rank] += self._federation.costs[job.level].macs * len(examples)
            if rank == distributed.global_rank:
                yield Dataset((examples.numpy(),), user_id=str(job.client), metadata={"job": job}), 0


class ServerModel(Model):
    """The server as pfl's central model."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def apply_model_update(self, statistics: MappedVectorStatistics) -> tuple["ServerModel", Metrics]:
        """The covered mean from the sums over all users."""
        layout = self.server.layout
        values: Tensors = {}
        weights: Tensors = {}
        for name in layout.axes:
            weights[name] = statistics[f"weight/{name}"]
            mean = statistics[f"sum/{name}"] / weights[name].clamp(min=1)
            values[name] = mean.to(self.server.shared[name].dtype)  # whole numbers are truncated
        return ServerModel(self.server.advance(Changes(CoveredMean(values, weights)))), Metrics()


class Rounds(FederatedAlgorithm):
    """The client's and the server's part of a round."""

    def __init__(self, config: Config, federation: Federation, rounds: int) -> None:
        super().__init__()
        self._config = config
        self._federation = federation
        self._rounds = rounds
        self._worker = Worker(federation)

    def get_next_central_contexts(
        self,
        model: ServerModel,
        iteration: int,
        algorithm_params: AlgorithmHyperParams,
        model_train_params: ModelHyperParams,
        model_eval_params: ModelHyperParams | None = None,
    ) -> tuple[tuple[CentralContext, ...] | None, ServerModel, Metrics]:
        """The next round, until there have been enough."""
        if iteration == self._rounds:
            return None, model, Metrics()
        context = CentralContext(
            current_central_iteration=iteration,
            do_evaluation=False,
            cohort_size=self._config.cohort_size,
            population=Population.TRAIN,
            algorithm_params=algorithm_params,
            model_train_params=model_train_params,
        )
        return (context,), model, Metrics()

    def simulate_one_user(
        self, model: ServerModel, user_dataset: Dataset, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """A client's turn. pfl adds up statistics of one structure, so an update is padded to the server's shapes."""
        job: Job = user_dataset.metadata["job"]
        trained = self._worker.train(model.server, job)
        part = trained.update | trained.buffers
        weight = 1.0 if trained.steps else 0.0  # incofl refuses the upload of a client that trained on nothing
        sums = {name: torch.zeros(shape) for name, shape in model.server.layout.shapes.items()}
        self._federation.slice(job.level, job.round).put(part, sums, weight)
        # Splitting by depth, the only kind here, holds a tensor whole or not at all: it has one weight.
        weights = {f"weight/{name}": torch.tensor(weight if name in part else 0.0) for name in sums}
        return MappedVectorStatistics({f"sum/{name}": value for name, value in sums.items()} | weights), Metrics()

    def process_aggregated_statistics(
        self,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
        model: ServerModel,
        statistics: MappedVectorStatistics,
    ) -> tuple[ServerModel, Metrics]:
        """Moves the server."""
        return model.apply_model_update(statistics)


class Clock(TrainingProcessCallback):
    """Notes the server and the time after every round."""

    def __init__(self) -> None:
        self.played: list[Played] = []
        self._start = 0.0

    def on_train_begin(self, *, model: ServerModel) -> Metrics:
        """Starts the clock."""
        self._start = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: ServerModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Notes a round."""
        now = time.perf_counter()
        self.played.append(Played(model.server, now - self._start))
        self._start = now
        return False, Metrics()


def run(config: Config, federation: Federation, server: Server, rounds: int) -> list[Played]:
    """Plays the rounds in every rank; all ranks get the same."""
    set_framework_module(pytorch_ops)
    torch.set_num_threads(1)  # a rank is a worker
    cohorts, clock = Cohorts(federation, server.round), Clock()
    Rounds(config, federation, rounds).run(
        AlgorithmHyperParams(),
        SimulatedBackend(cohorts, cohorts),
        ServerModel(server),
        ModelHyperParams(),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return clock.played
