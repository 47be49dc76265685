"""What models make of test examples: the outputs of their stages or blocks, as rows of features.

A model of several stages (ResNet) is looked at after each stage, one of a single stage (ViT, LSTM) after each block;
both only where every client has something. An example's representation is the whole output there, flattened, as
Kornblith et al. do; of texts with padding the mean over the words, as their classifier sees them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from incofl.analysis.clients import EXAMPLES, Replay
from incofl.data.dataset import Examples
from incofl.engine.federation import Federation
from incofl.errors import ConfigError, RunError
from incofl.layout import Layout
from incofl.models.text import PADDING
from incofl.seeds import Purpose, torch_rng
from incofl.split import Slice

BATCH = 100  # examples that go through a model at a time
FEWEST, MOST = 4, 2000  # examples: the unbiased CKA needs some; and matrices of examples by examples are held


@dataclass(frozen=True)
class Point:
    """Where models are compared: after the last block that a client holds of these."""

    name: str
    blocks: tuple[str, ...]


def common_points(layout: Layout, pieces: Sequence[Slice]) -> list[Point]:
    """The ends of stages, or the blocks of a model of one stage, as far as every slice holds some of them."""
    if len(layout.stages) > 1:
        points = [Point(stage_name(stage, number), stage) for number, stage in enumerate(layout.stages, start=1)]
    else:
        points = [Point(block, (block,)) for block in layout.blocks]
    held = [blocks_of(layout, piece) for piece in {id(piece): piece for piece in pieces}.values()]
    return [point for point in points if all(own & set(point.blocks) for own in held)]


def blocks_of(layout: Layout, piece: Slice) -> set[str | None]:
    """The blocks that a slice holds."""
    return {layout.block_of[name] for name in piece.index}


def last_held(layout: Layout, piece: Slice, point: Point) -> str:
    """The block after which a slice is compared."""
    held = blocks_of(layout, piece)
    return [block for block in point.blocks if block in held][-1]


def stage_name(stage: tuple[str, ...], number: int) -> str:
    """What the names of its blocks have in common; if nothing, its number."""
    parts = [block.split(".") for block in stage]
    same = [words[0] for words in itertools.takewhile(lambda w: len(set(w)) == 1, zip(*parts, strict=False))]
    return ".".join(same) or f"stage {number}"


def draw_examples(federation: Federation, examples: int) -> Examples:
    """The test examples on which models are compared, drawn by the seed."""
    if not FEWEST <= examples <= MOST:
        raise ConfigError(f"--examples: got {examples}, expected a whole number from {FEWEST} to {MOST}")
    test = federation.data.test
    stream = torch_rng(federation.seed, Purpose.ANALYSIS, EXAMPLES)
    return test.pick(torch.randperm(len(test), generator=stream)[:examples].sort().values)


def outputs_at(replay: Replay, module: nn.Module, blocks: Sequence[str], batch: Examples) -> tuple[list[Tensor], int]:
    """What some blocks of a model make of a batch, a row for each example, and how many it answers rightly."""
    parts: list[list[Tensor]] = []
    right = 0
    for start in range(0, len(batch), BATCH):
        part = batch.pick(slice(start, start + BATCH))
        x, y = replay.federation.data.pipeline.test(part.x), part.y
        held = x != PADDING if not x.is_floating_point() and y.dim() == 1 else None
        with outputs_of(module, blocks) as seen:
            logits = replay.logits(module, x)
            missing = [block for block in blocks if block not in seen]
            if missing:
                raise RunError(f"{replay.name}: block {missing[0]!r} of its model was not called, so it has no output")
            parts.append([rows(seen[block], len(x), held) for block in blocks])
        right += int((logits.argmax(1).cpu() == y).sum())
    return [torch.cat(own) for own in zip(*parts, strict=True)], right


@contextmanager
def outputs_of(module: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Inside, what the blocks give whenever the module is called."""
    seen: dict[str, Tensor] = {}

    def keep(block: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_: nn.Module, inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output  # recurrent layers give their states besides
            assert isinstance(first, Tensor)
            seen[block] = first.clone()  # what comes next may write into it

        return hook

    hooks = [module.get_submodule(block).register_forward_hook(keep(block)) for block in blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def rows(output: Tensor, examples: int, held: Tensor | None = None) -> Tensor:
    """One row for each example; ``held`` says which positions of a text are words."""
    if output.shape[0] != examples:  # a model of (position, example, channel)
        output = output.movedim(list(output.shape).index(examples), 0)
    if held is not None and output.dim() == 3 and output.shape[1] == held.shape[1]:
        held = held.to(output.device).unsqueeze(2)
        return output.where(held, 0).sum(1) / held.sum(1).clamp(min=1)
    return output.flatten(1)
