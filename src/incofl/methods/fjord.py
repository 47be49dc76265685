"""FjORD: a client trains its model at all widths up to its own, one of them in each batch.

Horvath et al., "FjORD: Fair and Accurate Federated Learning under Heterogeneous Targets with Ordered Dropout", NeurIPS
2021. In every batch a client draws one of the levels up to its own, all with the same probability, and trains the first
channels, which that level holds, inside its own model. With self-distillation it trains its whole model on the labels,
and the drawn width o_p on what the whole model, o, says:

    CE(o, y) + CE(o_p, softmax(o))        where o is not trained by the second term.

The server takes the covered mean, weighed by examples.

Differences: statistics of a width come from the clients whose own it is; in the original also from wider ones. Without
distillation only batches of the full width count for them. The optimiser is the configured one: with Adam the channels
beyond a drawn width move on by its momentum; the original has plain SGD.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from incofl.client import ClientRule, Local, Setting
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.path import Path, image_format, within
from incofl.split import Slice, Splitter, WidthRule, submodel
from incofl.tensors import Inputs, call

PATHS = "narrower"  # the attribute of a client's module that has its narrower paths


@options("fjord")
class FjORD(ClientRule):
    """Ordered dropout in a client's loss."""

    distil: bool = True  # train narrower widths on what the client's whole model says, else on the labels

    def check(self, setting: Setting) -> None:
        if self.distil:
            setting.need_classes("fjord.distil", "widths learn from the logits of classes", axis=False)

    def passes(self, level: int) -> Sequence[float]:
        drawn = [1 / (level + 1)] * (level + 1)
        return [*drawn[:-1], 1.0] if self.distil else drawn

    def nest(self, model: nn.Module, layout: Layout, splitter: Splitter, level: int) -> None:
        vars(model)[PATHS] = [path_in(model, layout, splitter, inner, level) for inner in range(level)]

    def loss(self, local: Local, x: Inputs, y: Tensor) -> Tensor:
        paths: list[Path] = vars(local.model)[PATHS]
        drawn = int(torch.randint(len(paths) + 1, ())) if paths else 0
        whole = drawn == len(paths)
        if not self.distil and not whole:
            return local.task.loss(paths[drawn](local.model, x), y)
        output: Tensor = call(local.model, x)
        loss = local.task.loss(output, y)
        return loss if whole else loss + soft_loss(paths[drawn](local.model, x), output)


def soft_loss(output: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of logits against what a teacher says, who does not learn from it."""
    return functional.cross_entropy(output, teacher.detach().softmax(1))


def path_in(model: nn.Module, layout: Layout, splitter: Splitter, inner: int, level: int) -> Path:
    """The path of a smaller level in a larger level's module."""
    small, large = (splitter.slice(layout, at) for at in (inner, level))
    names = small.index.keys() - layout.buffers
    index = {name: within(small.index[name], large.index[name], layout.shapes[name]) for name in names}
    module = submodel(model, layout, small).to(next(model.parameters()).device)
    images = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    last = all(parameter.is_contiguous(memory_format=torch.channels_last) for parameter in images)
    format = image_format(module) if last else torch.contiguous_format
    return Path(module.to(memory_format=format), Slice(index, small.shapes), format)  # type: ignore[call-overload]


fjord = Method("fjord", FjORD(), ServerRule("samples"), WidthRule())
