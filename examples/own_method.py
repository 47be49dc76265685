"""A method of your own: FedAvg over slices whose clients clip their gradients, with InCo on the server.

The round function does not know it is new. To put it into the table, move it to src/incofl/methods/ and add its name.
"""

from dataclasses import dataclass, replace

from torch.nn.utils import clip_grad_norm_

import incofl
from incofl.client import ClientRule, Local
from incofl.engine.build import build
from incofl.engine.executor import InProcess
from incofl.engine.round import RoundStats, run_round


@dataclass(frozen=True)
class Clipped(ClientRule):
    """Local training in which the gradient of a step is never longer than ``max_norm``."""

    max_norm: float = 1.0

    def adjust(self, local: Local) -> None:
        """Between the backward pass and the optimiser's step."""
        clip_grad_norm_(local.model.parameters(), self.max_norm)


clipped = incofl.Method("clippedavg", "heteroavg with clipped gradients", client=Clipped()).then(incofl.InCo())

federation = replace(build(incofl.make_config()), method=clipped)
executor, server = InProcess(federation), federation.start()
for _ in range(5):
    stats = RoundStats()
    server = run_round(server, clipped, federation.schedule(server.round, size=5), executor, stats)
    accuracies = [score.accuracy for score in executor.evaluate(server, federation.levels_in_use)]
    print(f"{clipped.name}  round {server.round}  loss {stats.loss:.3f}  accuracy {sum(accuracies) / 5:.3f}")
