"""Clients that minimise a parabola each: small enough for closed forms."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from incofl.client import ClientInput, ClientRule, Local, LocalSettings, Upload, train
from incofl.layout import Layout
from incofl.method import ServerRule
from incofl.server import Server
from incofl.split import Slice, cut
from incofl.tensors import Tensors

LAYOUT = Layout(axes={"w": (None,)}, shapes={"w": (1,)}, stages=((),), shallow={}, buffers=frozenset())
WHOLE: Slice = cut(LAYOUT, [])


class Point(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


@dataclass(frozen=True)
class Client:
    """f(w) = curvature / 2 (w - optimum)^2, and how many steps it takes."""

    curvature: float
    optimum: float
    steps: int
    examples: int = 1


def on_parabola(rule: type[ClientRule]) -> type[ClientRule]:
    """A client rule with the parabola for its loss: x holds curvature and optimum."""

    class Parabola(rule):  # type: ignore[misc, valid-type]
        def loss(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
            return x[0] / 2 * (local.model.get_parameter("w")[0] - x[1]) ** 2

    return Parabola


class Problem:
    """A population that all take part in every round, with plain SGD."""

    def __init__(self, clients: Sequence[Client], rule: ClientRule, server: ServerRule, lr: float) -> None:
        self.clients, self.rule, self.rule_of_server = clients, rule, server
        self.settings = LocalSettings(optimizer="sgd", lr=lr, momentum=0.0)
        start = Server(LAYOUT, {"w": torch.zeros(1)}, population={0: (WHOLE, len(clients))})
        self.server = server.start(start)
        self.memories: dict[int, Tensors] = {}

    def turn(self, number: int) -> Upload:
        client = self.clients[number]
        sent = WHOLE.take(self.rule_of_server.extra_for_client(self.server, 0))
        given = ClientInput(WHOLE.take(self.server.shared), sent, self.memories.get(number, {}))
        batch = torch.tensor([client.curvature, client.optimum]), torch.zeros(1)
        return train(Point(), given, [batch] * client.steps, self.rule, self.settings)

    def round(self, cohort: Sequence[int] | None = None) -> float:
        uploads = []
        for number in range(len(self.clients)) if cohort is None else cohort:
            t = self.turn(number)
            self.memories[number] = t.memory
            examples = self.clients[number].examples
            extra = {"extra": t.extra, "memory": t.memory, "normaliser": t.normaliser}
            uploads.append(Upload(number, 0, WHOLE, t.update, t.buffers, examples, t.steps, t.loss, **extra))  # type: ignore[arg-type]
        self.server = self.server.advance(self.rule_of_server.aggregate(self.server, [uploads]))
        return self.w

    @property
    def w(self) -> float:
        return float(self.server.shared["w"])
