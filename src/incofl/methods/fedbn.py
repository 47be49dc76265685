"""FedBN: every client keeps its own batch norm, scale, shift and statistics; all else is averaged.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

Differences: the original tests each client's model on data of its own and has no model for anybody else. Here clients
also upload their batch norm, and the server keeps the mean: it is what a level is evaluated with, and what a client
starts from in its first turn. So the traffic is FedAvg's. Other norm layers are averaged, as there.
"""

import torch

from incofl.client import ClientRule, Local, Setting, changing_buffers
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.tensors import Tensors


class FedBN(ClientRule):
    """The client half, which keeps its batch norm."""

    def memory(self, layout: Layout) -> frozenset[str]:
        return batch_norm(layout)

    def check(self, setting: Setting) -> None:
        if not batch_norm(setting.layout):
            raise ConfigError("method: fedbn needs a model with batch norm, which clients keep for themselves")
        if setting.buffers == "static":
            raise ConfigError("buffers: got 'static', expected another: fedbn keeps the statistics of clients")

    @torch.no_grad()
    def begin(self, local: Local) -> None:
        state = local.model.state_dict()
        for name, value in local.given.memory.items():
            state[name].copy_(value)

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        layers = {name.rpartition(".")[0] for name in changing_buffers(local.model, local.received)}
        state = local.model.state_dict()
        return {}, {name: value for name, value in state.items() if name.rpartition(".")[0] in layers}


def batch_norm(layout: Layout) -> frozenset[str]:
    """The entries of layers that keep statistics."""
    layers = {name.rpartition(".")[0] for name in layout.buffers}
    return frozenset(name for name in layout.axes if name.rpartition(".")[0] in layers and name not in layout.frozen)


fedbn = Method("fedbn", FedBN(), ServerRule(separate=True))
heterobn = Method("heterobn", FedBN())
