"""HeteroFL: narrower sub-models, the first ceil(r O) of the O channels of every layer.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021. In a client's loss the logits of classes that it has no example of are 0, not minus infinity: they count in
the denominator and carry no gradient. Of the head it contributes only the rows of its classes. Batch-norm statistics
are measured for each width before an evaluation. A scaler divides what enters a norm layer by the share of channels
held, which before batch norm changes nothing but the effect of eps.

Differences: the original is a pre-activation ResNet18 trained with SGD. The released code clips the gradient's norm at
1 (``local.max_grad_norm``), measures statistics on all training images (here ``eval.measured``), can draw levels anew
in each round, and evaluates the full width only, also with masked logits (here every width, never masked).
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from incofl.client import ClientRule, Local, Setting, Upload
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.split import Slice, WidthRule
from incofl.tensors import Inputs, call


@options("heterofl")
class HeteroFL(ClientRule):
    """What clients of HeteroFL and FedRolex do, and what of it the server uses."""

    stacks: ClassVar[bool] = True
    mask: bool = True  # set the logits of classes that a client does not have to 0 in its loss
    label_rows: bool = True  # let a client contribute only the head's rows of classes that it has
    scaler: bool = True  # divide what enters a norm layer by the share of channels held, while training

    def prepare(self, model: nn.Module, layout: Layout) -> None:
        for name, norm in model.named_modules() if self.scaler else ():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and (norm.affine or norm.track_running_stats):
                (full,) = layout.shapes[f"{name}.{'weight' if norm.affine else 'running_mean'}"]
                if norm.num_features < full:
                    norm.register_forward_pre_hook(functools.partial(scale, model, norm.num_features / full))

    def check(self, setting: Setting) -> None:
        if self.mask:
            setting.need_classes("heterofl.mask", "the logits of classes that a client does not have are masked")

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        logits: Tensor = call(local.model, x)
        if self.mask and local.given.labels is not None:
            absent = local.given.labels == 0
            logits = logits.masked_fill(absent.view(-1, *[1] * (logits.dim() - 2)), 0)  # (B, C), or (B, C, length)
        return local.task.loss(logits, y)


def scale(model: nn.Module, share: float, layer: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
    """Divides a layer's input by a number while the model, not only the layer, is in training mode."""
    return inputs[0] / share if model.training else None


@dataclass(frozen=True)
class HeteroFLServer(ServerRule):
    """The server half: the covered mean, with label rows."""

    options: HeteroFL = field(default_factory=HeteroFL)

    def check(self, setting: Setting) -> None:
        if self.options.label_rows:
            setting.need_classes("heterofl.label_rows", "clients contribute rows of the head")

    def filter_upload(self, upload: Upload, layout: Layout) -> Upload:
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
    dims = ((name, dim, axis) for name in names for dim, axis in enumerate(layout.axes[name]))
    return {name: dim for name, dim, axis in dims if axis is not None and axis.name == "classes"}


heterofl = Method("heterofl", HeteroFL(), HeteroFLServer(buffers="static"), WidthRule())
