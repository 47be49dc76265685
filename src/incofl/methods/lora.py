"""Federated LoRA with unequal ranks: how the server makes new factors A and B of those that clients have trained.

With p_k the weight of client k, R the ranks of the server model, s its scale and B_k A_k the product that a client ends
with, always over the clients that hold a layer:

    fedit         everybody has the smallest rank: mean A_k, mean B_k           (Zhang et al., ICASSP 2024)
    covered       the same, of each rank over those that hold it
    hetlora       zeros where a client has no rank, p_k ~ sum over layers of ||B_k A_k||_F  (Cho et al., EMNLP 2024)
    random-ranks  as ``covered``, for ranks drawn anew in every turn; all others are added to W for the turn (Fed-PLoRA,
                  Zhang et al., ICLR 2026)
    flexlora      U S and V' of the SVD of sum p_k B_k A_k                      (Bai et al., NeurIPS 2024)
    raflora       U sqrt(S) and sqrt(S) V' of the sum in which p_k of each rank is over those that hold it (raFLoRA,
                  Wu et al., arXiv:2602.13486)
    flora         W += s sum p_k B_k A_k; then B = 0 and A is drawn anew        (Wang et al., NeurIPS 2024)
    ffa           as ``covered`` with A fixed                                   (Sun et al., ICLR 2024)
    rolora        as ``covered``, B in the first round, A in the second, ...    (Chen et al., NeurIPS 2025)
    fedex         as ``covered``, and W += s (sum p_k B_k A_k - B A), p_k of each rank over those that hold it
                  (Singhal et al., ACL 2025)

Clients weigh by their examples, and those of ``hetlora`` may drop ranks (pruning.py). No matrix as large as W is made
but W itself (factors.py).

Differences: a rank that nobody of a cohort holds stays as it is in ``hetlora`` and ``raflora``, and an empty one keeps
an A with which it can learn. In ``flora`` and ``fedex`` W changes in every round, and clients are sent it as it is: a
client that was absent would need the factors of every round that it missed. FedEx-LoRA was made for equal ranks; with
p_k over all clients W would lose, round after round, what few clients hold.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from incofl.aggregate import CoveredMean
from incofl.client import ClientRule, Local, Setting, Upload
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.method import Method, ServerRule
from incofl.methods.adapters import A, Adapter, B, Lora, RankRule, adapters, head_of
from incofl.methods.factors import Factors, cut_ranks, shares
from incofl.methods.pruning import Pruned
from incofl.seeds import Purpose, torch_rng
from incofl.server import Changes, Server
from incofl.split import RANK, Drawn, Slice, Splitter, kept
from incofl.split.slices import ALL, cut
from incofl.tensors import Tensors, one_thread


class Turn(NamedTuple):
    """A client's weight, and the factors that it ends with."""

    weight: float
    factors: dict[Adapter, Factors]


@dataclass(frozen=True)
class AdapterRule(ServerRule):
    """The covered mean of all that is trained; each level may have a head of its own."""

    lora: Lora = field(default_factory=Lora)

    def private(self, layout: Layout, slice_: Slice) -> frozenset[str]:
        return head_of(layout) & layout.parameters & slice_.index.keys() if self.lora.head == "private" else frozenset()


@dataclass(frozen=True)
class FactorRule(AdapterRule):
    """A rule that looks at the factors of each client; what else is trained is averaged as usual."""

    only_means = False

    def combine(self, old: Factors, mean: Factors, parts: Sequence[Factors]) -> Factors:
        """The new factors of an adapter, from those before the round, their covered mean, and those of its clients."""
        return mean

    def weigh(self, turn: Turn) -> float:
        """The weight of a client in sums of products."""
        return turn.weight

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        known, turns = adapters(server.layout), list[Turn]()

        def watched() -> Iterator[Sequence[Upload]]:
            for uploads in arrivals:
                turns.extend(self._turn(server, upload, known) for upload in uploads)
                yield uploads

        changes = super().aggregate(server, watched())
        values, weights, given = dict(changes.shared.values), dict(changes.shared.weight), dict[str, Tensor]()
        with one_thread():  # so that bits do not depend on how many there are
            weighed = [(self.weigh(turn), turn.factors) for turn in turns]
            for adapter in known:
                if held := [factors[adapter].exact(p) for p, factors in weighed if adapter in factors]:
                    old, parts = Factors.of(adapter, server.shared).exact(), shares(held)
                    moved = {name: server.shared[name] + values.get(name, 0) for name in adapter[:2]}
                    mean = Factors.of(adapter, moved).exact()
                    new = self.combine(old, mean, parts)
                    for name, before, after in ((adapter.a, old.a, new.a), (adapter.b, old.b, new.b)):
                        if new is not mean:
                            like = server.shared[name]
                            values[name] = (after - before).view_as(like).to(like.dtype)
                            weights[name] = torch.ones([1] * like.dim(), dtype=like.dtype)
                    if added := self.added(mean, parts):
                        given[adapter.base] = merged(server, adapter, added, self.lora)
        return dataclasses.replace(changes, shared=CoveredMean(values, weights), given=given)

    def added(self, mean: Factors, parts: Sequence[Factors]) -> list[Factors]:
        """The products that are added to the adapted weight."""
        return []

    def _turn(self, server: Server, upload: Upload, known: Sequence[Adapter]) -> Turn:
        """What a client ends with: what it received and its update."""
        held = [adapter for adapter in known if adapter.a in upload.slice.index]
        received = upload.slice.look({name: server.shared[name] for adapter in held for name in adapter[:2]})
        final = {name: value + upload.update.get(name, 0) for name, value in received.items()}
        return Turn(self.weight(upload), {adapter: Factors.of(adapter, final) for adapter in held})


def merged(server: Server, adapter: Adapter, parts: Sequence[Factors], lora: Lora) -> Tensor:
    """An adapted weight with scaled products added."""
    weight, scale = server.shared[adapter.base], lora.scale(server.layout.named_axes[RANK].size)
    new = weight.flatten(1).clone()
    for part in parts:
        new.addmm_(part.b.to(new.dtype), part.a.to(new.dtype), alpha=part.weight * scale)
    return new.view_as(weight)


class HetLoRA(FactorRule):
    """Zeros in place of ranks that a client does not have; heavier where it has learned more."""

    def weigh(self, turn: Turn) -> float:
        return sum(part.exact().norm for part in turn.factors.values())

    def combine(self, old: Factors, mean: Factors, parts: Sequence[Factors]) -> Factors:
        largest = max(part.rank for part in parts)
        a, b = old.a.clone(), old.b.clone()
        a[:largest], b[:, :largest] = 0, 0
        for part in parts:
            a[: part.rank] += part.weight * part.a
            b[:, : part.rank] += part.weight * part.b
        return Factors(a, b)


class FlexLoRA(FactorRule):
    """The mean of the products, cut into ranks."""

    sets_values = True

    def combine(self, old: Factors, mean: Factors, parts: Sequence[Factors]) -> Factors:
        return cut_ranks(parts, old, balanced=False)


class RaFLoRA(FactorRule):
    """The mean of the products, of each band of ranks over those that hold it, cut into ranks."""

    sets_values = True

    def combine(self, old: Factors, mean: Factors, parts: Sequence[Factors]) -> Factors:
        nobody = old.ranks(max(part.rank for part in parts), old.rank, 1.0)
        return cut_ranks([nobody, *bands(parts)], old, balanced=True)


def bands(parts: Sequence[Factors]) -> Iterator[Factors]:
    """The factors of clients in bands of ranks that the same clients hold, with weights that sum to 1 in each."""
    ranks = sorted({part.rank for part in parts})
    for low, high in zip([0, *ranks], ranks, strict=False):
        for part in shares([part for part in parts if part.rank >= high]):
            yield part.ranks(low, high, part.weight)


class Merging(FactorRule):
    """A rule that changes the adapted weights."""

    sets_values = True

    def check(self, setting: Setting) -> None:
        if odd := [n for n, module in setting.model.named_modules() if getattr(module, "fan_in_fan_out", False)]:
            raise ConfigError(
                f"method: its rule cannot change {odd[0]!r}, whose weight has the inputs first; try flexlora"
            )


class FLoRA(Merging):
    """The mean of the products is added to the weights; adapters start anew."""

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        changes, rng = super().aggregate(server, arrivals), torch_rng(server.seed, Purpose.RESTART, server.round)
        values = dict(changes.shared.values)
        for adapter in adapters(server.layout):
            if adapter.base in changes.given:
                a = server.shared[adapter.a]
                fresh = torch.rand(a.shape, generator=rng, dtype=torch.float64).mul_(2).sub_(1)
                values[adapter.a] = (fresh / math.sqrt(a[0].numel())).to(a.dtype) - a  # as peft starts it
        return dataclasses.replace(changes, shared=CoveredMean(values, changes.shared.weight))

    def combine(self, old: Factors, mean: Factors, parts: Sequence[Factors]) -> Factors:
        return Factors(old.a, torch.zeros_like(old.b))

    def added(self, mean: Factors, parts: Sequence[Factors]) -> list[Factors]:
        return list(parts)


class FedEx(Merging):
    """What the means of the factors miss of the mean of the products is added to the weights."""

    def added(self, mean: Factors, parts: Sequence[Factors]) -> list[Factors]:
        return [*bands(parts), mean.ranks(0, max(part.rank for part in parts), -1.0)]


class Alternating(Splitter):
    """B is trained and uploaded in the first round, A in the second, and so on; both are sent."""

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None, drawn: Drawn = ()) -> Slice:
        made = Splitter(self.shares, self.depths).slice(layout, level)
        other = B if round % 2 else A
        return dataclasses.replace(made, given=made.given | {name for name in made.index if name.endswith(other)})


class OneFactor(ClientRule):
    """Trains one of the factors, and all that is no factor."""

    def adjust(self, local: Local) -> None:
        other = B if local.given.round % 2 else A
        for name, parameter in local.parameters.items():
            if name.endswith(other):
                parameter.grad = None


class RandomRanks(Splitter):
    """Ranks drawn for each turn; what is evaluated has all of them."""

    by_client: ClassVar[bool] = True

    def slice(self, layout: Layout, level: int, round: int = 0, client: int | None = None, drawn: Drawn = ()) -> Slice:
        whole = Splitter((1.0,) * len(self.shares), self.depths).slice(layout, level)
        if client is None:
            return whole
        size = layout.named_axes[RANK].size
        order = torch.randperm(size, generator=torch_rng(self.seed, Purpose.RANKS, round, client))
        ranks = order[: kept(size, self.shares[level])].sort().values
        return cut(layout, {block for name in whole.index if (block := layout.block_of[name])}, {RANK: ranks})


class AllSent(AdapterRule):
    """Sends all ranks to those that train some."""

    def extra_for_client(self, server: Server, level: int) -> Tensors:
        held = server.population[level][0].index if level in server.population else server.shared
        names = [name for adapter in adapters(server.layout) for name in adapter[:2]]
        return {ALL + name: server.shared[name] for name in names if name in held}


class Folded(ClientRule):
    """Adds the ranks that a client does not train to the adapted weights, for its turn."""

    def begin(self, local: Local) -> None:
        every, own = local.given.extra, local.received
        for name in [name for name in own if name.endswith(A) and ALL + name in every]:
            layer = name.removesuffix(A)
            module: Any = local.model.get_submodule(layer)
            both = [(every[ALL + layer + B], every[ALL + name]), (own[layer + B], own[name])]
            product, trained = (b.flatten(1) @ a.flatten(1) for b, a in both)
            rest = module.scaling["default"] * (product - trained)
            with torch.no_grad():
                weight = module.base_layer.weight
                weight += rest.T if getattr(module, "fan_in_fan_out", False) else rest.view_as(weight)


def _method(
    name: str, server: type[AdapterRule] = AdapterRule, client: ClientRule | None = None, **split: Any
) -> Method:
    return Method(name, client or ClientRule(), server("samples"), RankRule(**split))


fedit = dataclasses.replace(_method("fedit"), level="smallest")
covered = _method("covered")
hetlora = _method("hetlora", HetLoRA, Pruned())
random_ranks = _method("random-ranks", AllSent, Folded(), cutter=RandomRanks)
flexlora = _method("flexlora", FlexLoRA)
raflora = _method("raflora", RaFLoRA)
flora = _method("flora", FLoRA, merges=True)
ffa = _method("ffa", fixed_a=True)
rolora = _method("rolora", client=OneFactor(), cutter=Alternating)
fedex = _method("fedex", FedEx, merges=True)
