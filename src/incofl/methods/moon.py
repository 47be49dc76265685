"""MOON: a client's features stay near those of the received model and away from its own previous ones.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021. With z the features of an example, the input of the head,
under the model being trained, z_g under the received one and z_p under the client's previous one, the loss is

    cross-entropy + mu * mean of  -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) )

and cross-entropy alone in a client's first turn, which has no previous model.

Differences: no projection by default, as in NIID-Bench (256 in the original). mu = 1, the original's default (0.001 in
NIID-Bench). Both train with SGD. NIID-Bench leaves the frozen models in training mode, skips batches of one example,
and takes a never trained client's initial state for its previous model.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional

from incofl.client import ClientRule, Local, Setting
from incofl.errors import ConfigError
from incofl.layout import Axes, Axis, Layout, frozen_entries
from incofl.method import Method, ServerRule
from incofl.methods.heterofl import class_dimensions
from incofl.options import options
from incofl.tensors import Inputs, Tensors, call

NO_HEAD = "method: moon needs a model whose last layer is linear; {} has another"


@options("moon")
class Moon(ClientRule):
    """The contrastive term in a client's loss."""

    mu: Annotated[float, Ge(0)] = 1.0  # weight of the contrastive term; 0 is FedAvg
    temperature: Annotated[float, Gt(0)] = 0.5  # T
    # size of a projection before the head, 256 in the original; 0: none
    projection: Annotated[int, Ge(0), Le(2**16)] = 0

    def memory(self, layout: Layout) -> frozenset[str]:
        return layout.parameters | layout.buffers

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        return [self.memory(layout)] * 2

    def passes(self, level: int) -> Sequence[float]:
        # Two other models compute features forwards only, a third of what a step takes.
        return [0.0] * level + [5 / 3 if self.mu else 1.0]

    @torch.no_grad()
    def check(self, setting: Setting) -> None:
        if setting.buffers == "static":
            raise ConfigError("buffers: got 'static', expected another: moon evaluates models while it trains")
        if setting.compile:
            raise ConfigError("engine.compile: got true, expected false: moon looks into the model")
        setting.need_classes("moon", "it compares the features that its classifier uses", axis=False)
        with torch.device("meta"):  # for tensors that forward makes
            logits, last = watched(setting.model, setting.example)
        logits = logits[-1] if isinstance(logits, list) else logits  # of several exits the last
        if not last or last["output"].untyped_storage()._cdata != logits.untyped_storage()._cdata:
            raise ConfigError(NO_HEAD.format(type(setting.model).__name__))

    def extend(self, model: nn.Module, layout: Layout) -> Layout:
        return project(model, layout, self.projection) if self.projection else layout

    def begin(self, local: Local) -> None:
        if local.given.memory and self.mu:
            local.scratch["received"] = frozen(local.model, local.received)
            local.scratch["previous"] = frozen(local.model, local.received | local.given.memory)

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        if "previous" not in local.scratch:
            return super().loss(local, x, y)
        logits, z = with_features(local.model, x)
        with torch.no_grad():
            z_g, z_p = (with_features(local.scratch[which], x)[1] for which in ("received", "previous"))
        return local.task.loss(logits, y) + self.mu * contrast(z, z_g, z_p, self.temperature)

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        fixed = frozen_entries(local.model)
        return {}, {n: v.clone() for n, v in local.model.state_dict().items() if n not in fixed}


def contrast(z: Tensor, z_g: Tensor, z_p: Tensor, temperature: float) -> Tensor:
    """The contrastive term, a mean over the batch; log 2 where all three are the same."""
    near, far = (functional.cosine_similarity(z, other, dim=1) / temperature for other in (z_g, z_p))
    return functional.softplus(far - near).mean()  # -log(e^near / (e^near + e^far))


def project(model: nn.Module, layout: Layout, size: int) -> Layout:
    """Replaces the head, in place, by a projection of the features and a head on it; both sizes can be narrowed."""
    rows = class_dimensions(layout, layout.axes)
    name = next((n.removesuffix(".weight") for n in rows if n.endswith(".weight") and len(layout.shapes[n]) == 2), "")
    head = model.get_submodule(name)
    if not isinstance(head, nn.Linear):
        raise ConfigError(NO_HEAD.format(type(model).__name__))
    classes, features = layout.axes[f"{name}.weight"]
    width, outputs = head.in_features, head.out_features
    hidden, projected = Axis(f"{name}.hidden", width), Axis(f"{name}.projected", size)
    layers = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size), nn.Linear(size, outputs)
    model.set_submodule(name, nn.Sequential(*layers))
    axes: dict[str, Axes] = {entry: layout.axes[entry] for entry in model.state_dict() if entry in layout.axes}
    for layer, out, into in ((0, hidden, features), (2, projected, hidden), (3, classes, projected)):
        axes |= {f"{name}.{layer}.weight": (out, into), f"{name}.{layer}.bias": (out,)}
    changed = Layout.of(model, axes, layout.stages, layout.shallow, layout.exits)
    return dataclasses.replace(changed, kept_whole=layout.kept_whole)


def watched(model: nn.Module, x: Inputs) -> tuple[Any, dict[str, Tensor]]:
    """What the model returns, and ``input`` and ``output`` of the linear layer that was called last."""
    last: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, inputs, output: last.update(input=inputs[0], output=output))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    logits = call(model, x)
    for hook in hooks:
        hook.remove()
    return logits, last


def with_features(model: nn.Module, x: Inputs) -> tuple[Tensor, Tensor]:
    """Logits and features; of every position, where each has logits of its own."""
    logits, last = watched(model, x)
    return logits, last["input"].flatten(0, -2)


def frozen(model: nn.Module, state: Tensors) -> nn.Module:
    """A copy of a module with other values, for evaluation."""
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other.eval().requires_grad_(False)


moon = Method("moon", Moon(), ServerRule(separate=True))
heteromoon = Method("heteromoon", Moon())
