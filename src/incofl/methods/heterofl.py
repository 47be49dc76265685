"""HeteroFL: narrower sub-models, the first channels of every layer.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021. A level keeps the first ceil(r O) of the O channels of each layer and all blocks; the server averages every
position over the clients that hold it.

1. Masked cross-entropy: the logits of classes that a client has no example of are set to 0 (not to minus infinity) in
   its loss. They still count in the denominator and carry no gradient.
2. Label rows: of the head a client contributes only the rows, weights and biases, of classes that it has.
3. Static batch norm: statistics are not averaged. Before an evaluation they are measured for each width, with the
   weights as they are, on training images (``buffers = "static"``).
4. Scaler: while training, what enters a norm layer is divided by the share of channels that the client holds.
   Followed by batch norm with batch statistics it changes nothing but the effect of its eps.
5. Every convolution, norm and the head follow one rule for the channels they share, so residual additions line up.

Differences: the original network is a pre-activation ResNet18 with another stem, trained with SGD; here both are the
configured ones. The released code clips the gradient's norm at 1 (``local.max_grad_norm``, off here as in the
comparison with InCo), measures the statistics on all training images (here on ``eval.measured`` of them, drawn by the
seed), can draw every client's level anew in each round (here it is fixed), and evaluates the full width only, also with
the logits of absent classes masked (here every width, never masked). "Has" means at least one example.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from incofl.client import ClientRule, Local, Setting, Upload
from incofl.inputs import Inputs, call
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.split import Slice, WidthRule


@options("heterofl")
class HeteroFLOptions:
    """The config section ``heterofl``; FedRolex uses it too.

    Attributes:
        mask: set the logits of classes that a client does not have to 0 in its loss.
        label_rows: let a client contribute only the head's rows of classes that it has.
        scaler: divide what enters a norm layer by the share of channels held, while training.
    """

    mask: bool = True
    label_rows: bool = True
    scaler: bool = True


@dataclass(frozen=True)
class HeteroFL(ClientRule):
    """The client half."""

    options: HeteroFLOptions = field(default_factory=HeteroFLOptions)

    def prepare(self, model: nn.Module, layout: Layout) -> None:
        """Puts the scaler before every batch norm."""
        if not self.options.scaler:
            return
        for name, norm in model.named_modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and (norm.affine or norm.track_running_stats):
                (full,) = layout.shapes[f"{name}.{'weight' if norm.affine else 'running_mean'}"]
                share = norm.num_features / full
                if share < 1:
                    norm.register_forward_pre_hook(Scaler(model, share))

    def check(self, setting: Setting) -> None:
        """Masks need classes."""
        if self.options.mask:
            setting.need_classes("heterofl.mask", "the logits of classes that a client does not have are masked")

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        """Cross-entropy of masked logits."""
        logits: Tensor = call(local.model, x)
        if self.options.mask and local.given.labels is not None:
            absent = local.given.labels == 0
            logits = logits.masked_fill(absent.view(-1, *[1] * (logits.dim() - 2)), 0)  # (B, C), or (B, C, length)
        return local.task.loss(logits, y)


@dataclass(frozen=True)
class Scaler:
    """Divides a layer's input by a number while the model is in training mode."""

    model: nn.Module
    share: float

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
        """The new input."""
        return inputs[0] / self.share if self.model.training else None


@dataclass(frozen=True)
class HeteroFLServer(ServerRule):
    """The server half: the covered mean, with label rows."""

    options: HeteroFLOptions = field(default_factory=HeteroFLOptions)

    def check(self, setting: Setting) -> None:
        """Label rows need to know where the classes are."""
        if self.options.label_rows:
            setting.need_classes("heterofl.label_rows", "clients contribute rows of the head")

    def filter_upload(self, upload: Upload, layout: Layout) -> Upload:
        """Leaves out the rows of the head whose classes the client does not have."""
        if not self.options.label_rows or upload.labels is None or bool((upload.labels > 0).all()):
            return upload
        rows = torch.nonzero(upload.labels > 0).flatten()
        index, shapes, update = dict(upload.slice.index), dict(upload.slice.shapes), dict[str, Tensor](upload.update)
        for name, dim in class_dimensions(layout, upload.update).items():
            index[name] = (*index[name][:dim], rows, *index[name][dim + 1 :])
            shapes[name] = (*shapes[name][:dim], len(rows), *shapes[name][dim + 1 :])
            update[name] = update[name].index_select(dim, rows)
        return dataclasses.replace(upload, slice=Slice(index, shapes, upload.slice.frozen), update=update)


def class_dimensions(layout: Layout, names: Iterable[str]) -> dict[str, int]:
    """The entries that have a row per class, and which dimension that is."""
    found = {}
    for name in names:
        for dim, axis in enumerate(layout.axes[name]):
            if axis is not None and axis.name == "classes":
                found[name] = dim
    return found


heterofl = Method(
    "heterofl",
    HeteroFL(),
    HeteroFLServer(buffers="static"),
    WidthRule(),
)
