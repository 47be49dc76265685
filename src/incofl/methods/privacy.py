"""Client-level differential privacy where few clients hold a position: ``NAME+privacy``.

With C the bound of an upload, z the multiplier of the noise, and p a position of the server model:

    u_k     <-  u_k min(1, C / |u_k|)                              the whole upload as one vector
    sum_p    =  sum of u_k,p over those that hold p  +  N(0, z^2 C^2)    also where nobody of the cohort does
    mean_p   =  sum_p / d_p,      d_p = q n_p

where n_p is the number of clients of the fleet that hold p, and q the share of the fleet that takes part in a round:
both are public. The number of holders in the cohort is not: to divide by it would make a deep position, which few hold,
move by C/1 with one client and not with another, under noise that is sized for the whole cohort. So a round is one
Gaussian mechanism of multiplier z, to which any accountant applies (McMahan et al., ICLR 2018). The accounting is that
of dp-accounting, by Renyi divergences, for Poisson sampling (a client is added or removed) or cohorts of fixed size (a
client is replaced, which moves the sum by up to 2 C). InCo and other update transforms come after the noise, and cost
nothing.

With ``quantile`` the bound follows that quantile of the norms (Andrew et al., NeurIPS 2021): the number of uploads
within the bound, less half of them, is released with noise of deviation s, and the sum gets noise of multiplier
(z^-2 - (2 s)^-2)^(-1/2), so that both together are one mechanism of multiplier z.
"""

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from incofl.aggregate import CoveredMean, spread
from incofl.client import ClientRule, Setting, Upload
from incofl.errors import ConfigError, needs_extra
from incofl.method import Method, ServerRule
from incofl.options import options
from incofl.seeds import Purpose, torch_rng
from incofl.server import Changes, Server
from incofl.tensors import Tensors, norm
from incofl.transform import Context, Record, Stateless
from incofl.upload import UploadStack

STATE = "privacy"  # the table of the server's extra state with the bound, and what was spent
Sampling = Literal["poisson", "fixed"]


@options("privacy")
class Privacy:
    """Client-level differential privacy: what is sent back to clients, and released, hides who took part."""

    clip: Annotated[float, Gt(0)] = 1.0  # bound of the norm of an upload; with ``quantile``, the first one
    # multiplier of the noise, in units of the bound; left out, the least that keeps to ``epsilon`` over all rounds
    noise: Annotated[float, Ge(0)] | None = None
    epsilon: Annotated[float, Gt(0)] | None = None  # the budget: a run stops before a round that would exceed it
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5  # at most one over the number of clients
    # ``poisson``: each client takes part with the same probability, by itself; ``fixed``: cohorts of one size, which
    # costs more
    sampling: Sampling = "poisson"
    quantile: Annotated[float, Gt(0), Lt(1)] | None = None  # of the norms that the bound follows; None: it is fixed
    clip_rate: Annotated[float, Gt(0)] = 0.2  # how fast it does
    # deviation of the noise on the number of uploads within the bound; left out, a twentieth of the cohort, and at
    # least the multiplier
    count_noise: Annotated[float, Gt(0)] | None = None

    def for_fleet(self, cohort: int, clients: int, rounds: int) -> "Privacy":
        """These options with the noise that the budget allows, checked."""
        if self.delta > 1 / clients:
            raise ConfigError(f"privacy.delta: got {self.delta:g}, expected at most one over {clients} clients")
        noise = self.noise
        if noise is None:
            if self.epsilon is None:
                raise ConfigError("privacy: got neither epsilon nor noise, expected one, such as privacy.epsilon=8")
            noise = noise_for(self.epsilon, self.delta, self.sampling, cohort, clients, rounds)
        if not noise:
            raise ConfigError("privacy.noise: got 0, expected more: without noise nothing is private")
        least = self.count_noise
        if self.quantile is not None and least is not None and least <= noise / 2:
            raise ConfigError(
                f"privacy.count_noise: got {least:g}, expected more than half of the noise, {noise / 2:g}"
            )
        return dataclasses.replace(self, noise=noise)

    def added_to(self, method: Method) -> Method:
        """The method with private means; refuses what would let more than the noisy sums depend on clients' data."""
        server, client = method.server, method.client
        uses = [
            (type(server) is not ServerRule or server.separate, "its server keeps more than one mean of all uploads"),
            (method.level == "largest-only", "some of the fleet never take part"),
            (type(client).normaliser is not ClientRule.normaliser, "its mean depends on how long clients trained"),
            (method.split.window != "prefix", "it is not known in advance who holds which channel"),
        ]
        for wrong, why in uses:
            if wrong:
                raise ConfigError(f"method: got {method.name}, expected a method whose mean is plain: {why}")
        plain = {f.name: getattr(server, f.name) for f in dataclasses.fields(server)}
        rule = PrivateMean(**plain, privacy=self)
        return dataclasses.replace(method, server=rule, transforms=(Spent(), *method.transforms))


@dataclass(frozen=True)
class PrivateMean(ServerRule):
    """The sum of bounded uploads, with noise at every position, over numbers that are public."""

    privacy: Privacy = field(default_factory=Privacy)
    confidential: ClassVar[bool] = True

    @property
    def poisson(self) -> bool:
        return self.privacy.sampling == "poisson"

    def check(self, setting: Setting) -> None:
        if setting.layout.buffers:
            some = sorted(setting.layout.buffers)[0]
            hint = "take a model with group or layer norm"
            raise ConfigError(f"privacy: the model has statistics that no noise protects ({some}); {hint}")
        if self.weighting != "uniform":
            raise ConfigError(f"aggregate.weighting: got {self.weighting!r}, expected 'uniform' with privacy")
        if self.squares:
            raise ConfigError("coverage.kind: got 'signal', expected 'count' with privacy: it looks at every upload")

    def start(self, server: Server) -> Server:
        return dataclasses.replace(server, extra={**server.extra, STATE: {"clip": _number(self.privacy.clip)}})

    def ended(self, server: Server) -> str | None:
        clients = sum(count for _, count in server.population.values())
        if self.privacy.epsilon is None or self._epsilon(server.round + 1, clients) <= self.privacy.epsilon:
            return None
        return f"the privacy budget of epsilon = {self.privacy.epsilon:g} is spent"

    def aggregate(self, server: Server, arrivals: Iterable[Sequence[Upload]]) -> Changes:
        bound, within, total = float(server.extra[STATE]["clip"]), list[bool](), self.privacy.noise or 0.0
        changes = super().aggregate(server, _clipped(arrivals, bound, within))
        clients = sum(count for _, count in server.population.values())
        rng, options = torch_rng(server.seed, Purpose.PRIVACY, server.round), self.privacy
        state, deviation = {"clip": _number(bound)}, total
        if options.quantile is not None:
            count_noise = options.count_noise or max(self.cohort / 20, total)
            deviation = (total**-2 - (2 * count_noise) ** -2) ** -0.5 if total else 0.0
            disturbed = count_noise * float(torch.randn((), generator=rng)) if total else 0.0
            share = 0.5 + (sum(within) - len(within) / 2 + disturbed) / self.cohort
            state["clip"] = _number(bound * math.exp(-options.clip_rate * (share - options.quantile)))
        values, weight = Tensors(), Tensors()
        for name in sorted(server.layout.parameters):
            held = [(slice_, float(n)) for slice_, n in server.population.values() if name in slice_.index]
            if not held:
                continue
            expected = spread(server.layout, name, held) * (self.cohort / clients)  # holders in a cohort
            noise = torch.randn(server.layout.shapes[name], generator=rng) * (deviation * bound)
            if name in changes.shared.values:
                noise += changes.shared.values[name] * changes.shared.weight[name].to(noise)
            mean = noise / torch.where(expected > 0, expected, 1).to(noise)
            values[name] = torch.where(expected > 0, mean, 0)
            weight[name] = expected
        if total:
            state["epsilon"] = _number(self._epsilon(server.round + 1, clients))
            state["noise"] = _number(total)
        extra = {**changes.extra, STATE: state}
        return dataclasses.replace(changes, shared=CoveredMean(values, weight), extra=extra, unit=1.0)

    def _epsilon(self, rounds: int, clients: int) -> float:
        options = self.privacy
        return epsilon_of(options.noise or 0.0, options.delta, options.sampling, self.cohort, clients, rounds)


@dataclass(frozen=True)
class Spent(Stateless):
    """Records the bound of uploads and the epsilon that all rounds together have spent."""

    name = "privacy"

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        found = {name: float(value) for name, value in context.extra.get(STATE, {}).items()}
        return update, state, {"spent": found} if found else {}


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _clipped(arrivals: Iterable[Sequence[Upload]], bound: float, within: list[bool]) -> Iterator[Sequence[Upload]]:
    """The uploads, none longer than the bound; notes which were not longer before."""
    for uploads in arrivals:
        if isinstance(uploads, UploadStack):
            squares = sum(value.double().flatten(1).square().sum(1) for value in uploads.update.values())
            lengths = [math.sqrt(float(square)) for square in torch.as_tensor(squares)]
            factors = torch.tensor([min(1.0, bound / length) if length else 1.0 for length in lengths])
            shrunk = {n: v * factors.view(-1, *[1] * (v.dim() - 1)).to(v) for n, v in uploads.update.items()}
            within += [length <= bound for length in lengths]
            yield dataclasses.replace(uploads, update=shrunk)
            continue
        clipped = []
        for upload in uploads:
            length = math.sqrt(math.fsum(norm(value.double()) ** 2 for value in upload.update.values()))
            factor = min(1.0, bound / length) if length else 1.0
            within.append(length <= bound)
            shrunk = {name: value * factor for name, value in upload.update.items()}
            clipped.append(dataclasses.replace(upload, update=shrunk) if factor < 1 else upload)
        yield clipped


def epsilon_of(noise: float, delta: float, sampling: Sampling, cohort: int, clients: int, rounds: int) -> float:
    """What so many rounds spend, at that delta."""
    if not rounds:
        return 0.0
    one = _one_round(noise, sampling, cohort, clients)
    with needs_extra("privacy", "privacy"):
        from dp_accounting.rdp import compute_epsilon
    return float(compute_epsilon(one.orders, rounds * one.rdp, delta)[0])


def noise_for(epsilon: float, delta: float, sampling: Sampling, cohort: int, clients: int, rounds: int) -> float:
    """The least multiplier, to three digits, with which so many rounds spend no more than epsilon."""
    low, high = 0.01, 1.0
    while epsilon_of(high, delta, sampling, cohort, clients, rounds) > epsilon:
        low, high = high, 2 * high
        if high > 2**20:
            raise ConfigError(f"privacy.epsilon: got {epsilon:g}, expected more: no noise is enough for it")
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        spent = epsilon_of(middle, delta, sampling, cohort, clients, rounds)
        low, high = (middle, high) if spent > epsilon else (low, middle)
    return high


@cache
def _one_round(noise: float, sampling: Sampling, cohort: int, clients: int) -> Any:
    """An accountant of dp-accounting after one round; the Renyi divergences of several are their sum."""
    with needs_extra("privacy", "privacy"):
        import dp_accounting as dp
        from dp_accounting import rdp
    # It says which of its orders it could not compute: the others bound epsilon as well.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if sampling == "poisson":
        relation, gaussian = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.GaussianDpEvent(noise)
        event = gaussian if cohort >= clients else dp.PoissonSampledDpEvent(cohort / clients, gaussian)
    else:
        relation, gaussian = dp.NeighboringRelation.REPLACE_ONE, dp.GaussianDpEvent(noise / 2)
        event = gaussian if cohort >= clients else dp.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    return rdp.RdpAccountant(neighboring_relation=relation).compose(event)
