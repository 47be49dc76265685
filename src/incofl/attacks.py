"""Attacks as instruments: what hostile or broken clients send, to measure how well a method stands it.

With u what a client would send, s the ``scale``, and m and d the mean and the standard deviation, at each position, of
what the attackers of the cohort that hold it would send:

    sign-flip           -s u                                    scaling           s u
    noise               u + s N(0, var u), tensor by tensor     free-ride         0, without training
    little-is-enough    m - s d          (Baruch et al., NeurIPS 2019)
    inner-product       -s m             (Xie et al., UAI 2019)
    not-a-number        NaN everywhere                          magnitude         s everywhere
    shape               tensors with one more entry along the first dimension
    replay              what it sent in its first turn, in every turn
    label-flip          trained on the label classes - 1 - y    backdoor          trained on examples with a trigger

Attackers that collude know of each other and of no honest client: the weaker setting of both papers, which estimate m
and d from the attackers' own data. An attacker alone has d = 0 and m = u. Batch-norm statistics and what a method
uploads in addition stay honest, except that ``not-a-number`` and ``magnitude`` replace them too, and that a free rider
returns the statistics it got.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import NormalDist
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from incofl.aggregate import Accumulator, Contribution
from incofl.data import Data, Examples
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.methods.noise import add_noise_
from incofl.options import options
from incofl.seeds import Purpose, numpy_rng, torch_rng
from incofl.server import Server
from incofl.tensors import Tensors
from incofl.upload import Upload

Kind = Literal[
    "sign-flip",
    "scaling",
    "noise",
    "free-ride",
    "little-is-enough",
    "inner-product",
    "not-a-number",
    "magnitude",
    "shape",
    "replay",
    "label-flip",
    "backdoor",
]
COLLUDING = ("little-is-enough", "inner-product")
ON_DATA = ("label-flip", "backdoor")
# What ``scale`` is where it is left out; the one of a-little-is-enough follows from the number of attackers.
SCALES = {"sign-flip": 1.0, "scaling": 100.0, "noise": 10.0, "inner-product": 1.0, "magnitude": 1e30}


@options("attack")
class Attack:
    """What hostile clients do; for measurements. By default there are none."""

    kind: Kind | None = None  # what attackers send or train on, as in docs/robustness.md; None: there are none
    share: Annotated[float, Ge(0), Le(1)] = 0.2  # of all clients, drawn by the seed
    # ``anybody``, or ``deepest``: not a share of all clients but those of the largest level, the only ones that hold
    # the deepest blocks
    only: Literal["anybody", "deepest"] = "anybody"
    scale: float | None = None  # how much, in units of the kind; left out, what suits it
    target: Annotated[int, Ge(0)] = 0  # the class that a backdoor leads to
    poisoned: Annotated[float, Gt(0), Le(1)] = 0.5  # share of an attacker's examples that get the backdoor's trigger

    def clients(self, levels: Sequence[int], seed: int) -> frozenset[int]:
        """The attackers, from the level that each client trains."""
        if self.kind is None:
            return frozenset()
        if self.only == "deepest":
            return frozenset(client for client, level in enumerate(levels) if level == max(levels))
        drawn = numpy_rng(seed, Purpose.ATTACK).permutation(len(levels))[: round(self.share * len(levels))]
        return frozenset(drawn.tolist())

    @property
    def factor(self) -> float:
        return SCALES.get(self.kind or "", 1.0) if self.scale is None else self.scale

    def sent(self, upload: Upload, server: Server) -> Upload:
        """What an attacker sends by itself instead of its upload."""

        def everywhere(change: Callable[[Tensor], Tensor]) -> Upload:
            tables: dict[str, Any] = {
                table: {n: change(v) if v.is_floating_point() else v for n, v in getattr(upload, table).items()}
                for table in ("update", "buffers", "extra", "smallest")
            }
            return dataclasses.replace(upload, **tables)

        def updates(change: Callable[[Tensor], Tensor]) -> Upload:
            return dataclasses.replace(upload, update={n: change(v) for n, v in upload.update.items()})

        match self.kind:
            case "sign-flip":
                return updates(lambda u: -self.factor * u)
            case "scaling":
                return updates(lambda u: self.factor * u)
            case "not-a-number":
                return everywhere(lambda u: torch.full_like(u, torch.nan))
            case "magnitude":
                return everywhere(lambda u: torch.full_like(u, self.factor))
            case "shape":
                return updates(lambda u: torch.cat([u, u[:1]]) if u.dim() else u.expand(2))
            case "free-ride":
                buffers = upload.slice.take({n: server.state(upload.level)[n] for n in upload.buffers})
                return dataclasses.replace(updates(torch.zeros_like), buffers=buffers)
            case "noise":
                rng = torch_rng(server.seed, Purpose.ATTACK, server.round, upload.client)
                noisy = {name: upload.update[name].clone() for name in sorted(upload.update)}
                for value in noisy.values():
                    add_noise_(value, self.factor, rng)
                return dataclasses.replace(upload, update=noisy)
        return upload

    def sent_together(self, uploads: Sequence[Upload], layout: Layout, cohort: int) -> list[Upload]:
        """What attackers send who know of each other, instead of their uploads."""
        mean, deviation = spread_of(uploads, layout)
        if self.kind == "inner-product":
            made = {name: -self.factor * value for name, value in mean.items()}
        else:
            z = little(cohort, len(uploads)) if self.scale is None else self.scale
            made = {name: value - z * deviation[name] for name, value in mean.items()}
        return [
            dataclasses.replace(
                u, update={n: v.to(u.update[n]) for n, v in u.slice.take(made).items() if n in u.update}
            )
            for u in uploads
        ]

    def poison(self, data: Data, partition: Sequence[Tensor], clients: Set[int], seed: int) -> Data:
        """The data, with what attackers have made of theirs."""
        train: Examples = data.train
        if train.y.is_floating_point() or data.classes is None or train.y.dim() > 1:
            raise ConfigError(f"attack.kind: got {self.kind!r}, expected data with a class per example")
        mine, y = sorted(clients), train.y.clone()
        if self.kind == "label-flip":
            held = torch.cat([torch.empty(0, dtype=torch.long), *(partition[client] for client in mine)])
            y[held] = data.classes - 1 - y[held]
            return dataclasses.replace(data, train=dataclasses.replace(train, y=y))
        if self.target >= data.classes:
            raise ConfigError(f"attack.target: got {self.target}, expected a class below {data.classes}")
        chosen = [torch.empty(0, dtype=torch.long)]
        for client in mine:
            order = torch.randperm(len(partition[client]), generator=torch_rng(seed, Purpose.ATTACK, 0, client))
            chosen.append(partition[client][order[: math.ceil(self.poisoned * len(order))]])
        held = torch.cat(chosen)
        x = train.x.clone() if isinstance(train.x, Tensor) else train.x
        x[held], y[held] = with_trigger(x[held]), self.target
        return dataclasses.replace(data, train=dataclasses.replace(train, x=x, y=y))

    def triggered(self, test: Examples) -> Examples:
        """Test examples of other classes with the trigger, whose label is the target: accuracy on them is success."""
        others = test.pick(test.y != self.target)
        return Examples(with_trigger(others.x), torch.full_like(others.y, self.target))


def with_trigger(x: Any) -> Tensor:
    """Images with a bright square in the lower right corner, an eighth of a side, two pixels at least."""
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        raise ConfigError("attack.kind: got 'backdoor', expected images, for its trigger")
    side, new = max(2, x.shape[-1] // 8), x.clone()
    new[..., -side:, -side:] = 255 if x.dtype == torch.uint8 else 1
    return new


def little(n: int, m: int) -> float:
    """How many deviations m attackers of n clients can shift a mean by and still look like a majority (Baruch et al.).

    With s = floor(n / 2 + 1) - m honest clients on their side they have one; z is the quantile of the normal
    distribution beyond which s of the n - m honest ones are, and 0 at least.
    """
    supporters = n // 2 + 1 - m
    share = (n - m - supporters) / max(n - m, 1)
    return NormalDist().inv_cdf(min(max(share, 0.5), 0.999))


def spread_of(uploads: Iterable[Upload], layout: Layout) -> tuple[Tensors, Mapping[str, Tensor]]:
    """Mean and standard deviation of updates at each position, over those that hold it, in server coordinates."""
    uploads = list(uploads)

    def mean(power: int) -> Tensors:
        total = Accumulator(layout, torch.float64)
        for upload in uploads:
            total.add(Contribution(upload.slice, {n: v.double() ** power for n, v in upload.update.items()}))
        return total.mean().values

    means, squares = mean(1), mean(2)
    return means, {name: (squares[name] - value.square()).clamp(min=0).sqrt() for name, value in means.items()}
