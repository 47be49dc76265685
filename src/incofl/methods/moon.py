"""MOON: a client's features stay near those of the received model and away from its own previous ones.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021. With z the features of an example under the model being
trained, z_g under the received one and z_p under the client's previous one, the loss is

    cross-entropy + mu * mean of  -log( e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}) )

1. Features are what the model's head (its last linear layer) gets: the pooled features of a ResNet.
2. The received model is the sub-model of the client's own size, so all features have one length.
3. Both other models are frozen, in evaluation mode, and without gradients.
4. A client that trains for the first time has no previous model, and no contrastive term.
5. A client remembers its last local model, also where a run is interrupted and resumed.

6. ``moon.projection`` puts a projection between features and head, Linear(F, F), ReLU, Linear(F, projection), which the
   clients train as part of the model; z is then what the projection gives. Width splitting narrows it like the rest.

Differences: no projection by default, as in NIID-Bench; the original has one, of size 256. mu = 1, the original's
default (its authors tune it, up to 10; NIID-Bench's is 0.001), and T = 0.5 as everywhere. Both train with SGD; here the
optimiser is the configured one. NIID-Bench leaves the frozen models in training mode, skips batches of one example, and
takes a never trained client's initial state for its previous model.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from torch.nn import functional

from incofl.client import ClientRule, Local, Setting
from incofl.errors import ConfigError
from incofl.inputs import Inputs, call
from incofl.layout import Axes, Axis, Layout, frozen_entries
from incofl.method import Method, ServerRule
from incofl.methods.heterofl import class_dimensions
from incofl.options import options
from incofl.tensors import Tensors


@options("moon")
class Moon(ClientRule):
    """The client half: the config section ``moon``.

    Attributes:
        mu: weight of the contrastive term; 0 is FedAvg.
        temperature: T.
        projection: size of a projection before the head, 256 in the original; 0: none.
    """

    mu: Annotated[float, Ge(0)] = 1.0
    temperature: Annotated[float, Gt(0)] = 0.5
    projection: Annotated[int, Ge(0), Le(2**16)] = 0

    def memory(self, layout: Layout) -> frozenset[str]:
        """The last local model, buffers included."""
        return layout.parameters | layout.buffers

    def held(self, layout: Layout) -> Sequence[frozenset[str]]:
        """The two models that are not trained."""
        return [self.memory(layout)] * 2

    @torch.no_grad()
    def check(self, setting: Setting) -> None:
        """MOON needs to see features: the input of the linear layer whose output the logits are."""
        if setting.buffers == "static":
            raise ConfigError("buffers: got 'static', expected another: moon evaluates models while it trains")
        if setting.compile:
            raise ConfigError("engine.compile: got true, expected false: moon looks into the model")
        setting.need_classes("moon", "it compares the features that its classifier uses", axis=False)
        model, made = setting.model, list[Tensor]()
        hooks = [layer.register_forward_hook(lambda _, inputs, output: made.append(output)) for layer in linear(model)]
        with torch.device("meta"):  # for tensors that forward makes
            logits = call(model, setting.example)
        for hook in hooks:
            hook.remove()
        outputs = logits[-1:] if isinstance(logits, list) else [logits]  # of several exits the last
        if not made or any(made[-1].untyped_storage()._cdata != out.untyped_storage()._cdata for out in outputs):
            raise no_head(model)

    def extend(self, model: nn.Module, layout: Layout) -> Layout:
        """Puts the projection before the head."""
        return project(model, layout, self.projection) if self.projection else layout

    def begin(self, local: Local) -> None:
        """The two frozen models, if there is a previous one."""
        if local.given.memory and self.mu:
            local.scratch["received"] = frozen(local.model, local.received)
            local.scratch["previous"] = frozen(local.model, local.received | local.given.memory)

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        """Cross-entropy and the contrastive term."""
        if "previous" not in local.scratch:
            return super().loss(local, x, y)
        logits, z = with_features(local.model, x)
        with torch.no_grad():
            z_g, z_p = (with_features(local.scratch[which], x)[1] for which in ("received", "previous"))
        return local.task.loss(logits, y) + self.mu * contrast(z, z_g, z_p, self.temperature)

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        """Remembers the model as it is now."""
        kept = local.model.state_dict().keys() - frozen_entries(local.model)
        return {}, {n: value.detach().clone() for n, value in local.model.state_dict().items() if n in kept}


def contrast(z: Tensor, z_g: Tensor, z_p: Tensor, temperature: float) -> Tensor:
    """Mean over the batch; log 2 where all three are the same."""
    near, far = (functional.cosine_similarity(z, other, dim=1) / temperature for other in (z_g, z_p))
    return functional.softplus(far - near).mean()  # -log(e^near / (e^near + e^far))


def linear(model: nn.Module) -> list[nn.Linear]:
    """All linear layers."""
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def no_head(model: nn.Module) -> ConfigError:
    """What is said of a model whose features MOON cannot see."""
    kind = type(model).__name__
    return ConfigError(f"method: moon needs a model whose last layer is linear; {kind} has another")


def project(model: nn.Module, layout: Layout, size: int) -> Layout:
    """Replaces the head, in place, by a projection of the features and a head on it; both sizes can be narrowed."""
    rows = class_dimensions(layout, layout.axes)
    name = next((n.removesuffix(".weight") for n in rows if n.endswith(".weight") and len(layout.shapes[n]) == 2), "")
    head = model.get_submodule(name)
    if not isinstance(head, nn.Linear):
        raise no_head(model)
    classes, features = layout.axes[f"{name}.weight"]
    hidden, projected = Axis(f"{name}.hidden", head.in_features), Axis(f"{name}.projected", size)
    model.set_submodule(
        name,
        nn.Sequential(
            nn.Linear(head.in_features, hidden.size),
            nn.ReLU(),
            nn.Linear(hidden.size, projected.size),
            nn.Linear(projected.size, head.out_features),
        ),
    )
    axes: dict[str, Axes] = {entry: layout.axes[entry] for entry in model.state_dict() if entry in layout.axes}
    for layer, outputs, inputs in ((0, hidden, features), (2, projected, hidden), (3, classes, projected)):
        axes |= {f"{name}.{layer}.weight": (outputs, inputs), f"{name}.{layer}.bias": (outputs,)}
    changed = Layout.of(model, axes, layout.stages, layout.shallow, layout.exits)
    return dataclasses.replace(changed, kept_whole=layout.kept_whole)


def with_features(model: nn.Module, x: Inputs) -> tuple[Tensor, Tensor]:
    """Logits, and what the last linear layer got to make them of."""
    seen: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for layer in linear(model)]
    logits: Tensor = call(model, x)
    for hook in hooks:
        hook.remove()
    return logits, seen[-1].flatten(0, -2)  # of every position, where each has logits of its own


def frozen(model: nn.Module, state: Tensors) -> nn.Module:
    """A copy of a module with other values, for evaluation."""
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other.eval().requires_grad_(False)


moon = Method("moon", Moon(), ServerRule(separate=True))
heteromoon = Method("heteromoon", Moon())
