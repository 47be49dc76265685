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
import secrets
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from incofl.aggregate import CoveredMean, spread
from incofl.client import ClientRule, Setting, Upload
from incofl.errors import ConfigError, needs_extra
from incofl.mean import Arrivals, Averages, Mean
from incofl.method import ServerRule
from incofl.options import options
from incofl.seeds import Purpose, torch_rng
from incofl.server import Changes, Server
from incofl.tensors import Tensors, length

LARGEST_CHANGE = 50.0  # of the logarithm of the adaptive bound in a round, so that it stays a number
STATE = "privacy"  # the table of the server's extra state with the bound, and the seed of the noise
Sampling = Literal["poisson", "fixed"]


@options("privacy")
class Privacy(Mean):
    """The sum of bounded uploads, with noise at every position, over public numbers of holders."""

    clip: Annotated[float, Gt(0)] = 1.0  # bound of the norm of an upload; with ``quantile``, the first one
    # multiplier of the noise, in units of the bound; left out, the least that keeps to ``epsilon`` over all rounds
    noise: Annotated[float, Ge(0)] | None = None
    epsilon: Annotated[float, Gt(0)] | None = None  # the budget: a run stops before a round that would exceed it
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5  # at most one over the number of clients
    # ``poisson``: each client takes part with the same probability, by itself; ``fixed``: cohorts of one size, which
    # costs more
    sampling: Sampling = "poisson"
    # draw cohorts and noise from a random number of the server's own, which is in the checkpoint and nowhere else: what
    # a real fleet needs, where clients know the seed; the run can be resumed, and not repeated
    secret: bool = False
    quantile: Annotated[float, Gt(0), Lt(1)] | None = None  # of the norms that the bound follows; None: it is fixed
    clip_rate: Annotated[float, Gt(0)] = 0.2  # how fast it does
    # deviation of the noise on the number of uploads within the bound; left out, a twentieth of the cohort, and at
    # least the multiplier
    count_noise: Annotated[float, Gt(0)] | None = None

    robust: ClassVar[bool] = True
    confidential: ClassVar[bool] = True

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
            want = f"expected more than half of the noise, {noise / 2:g}"
            raise ConfigError(f"privacy.count_noise: got {least:g}, {want}")
        return dataclasses.replace(self, noise=noise)

    @property
    def poisson(self) -> bool:
        return self.sampling == "poisson"

    @property
    def has_secret(self) -> bool:
        return self.secret

    def seed(self, server: Server) -> int:
        """The seed of cohorts and noise."""
        return int(server.extra.get(STATE, {}).get("seed", server.seed))

    def check(self, method: Any, setting: Setting) -> None:
        """Refuses what would let more than the noisy sums depend on clients' data."""
        server, layout = method.server, setting.layout
        uses = [
            (type(server) is not ServerRule or server.separate, "its server keeps more than one mean of all uploads"),
            (method.level == "largest-only", "some of the fleet never take part"),
            (type(method.client).normaliser is not ClientRule.normaliser, "it depends on how long clients trained"),
            (method.split.window != "prefix", "it is not known in advance who holds which channel"),
        ]
        for wrong, why in uses:
            if wrong:
                raise ConfigError(f"method: got {method.name}, expected a method whose mean is plain: {why}")
        if layout.buffers:
            hint = "take a model with group or layer norm"
            some = min(layout.buffers)
            raise ConfigError(f"privacy: the model has statistics that no noise protects ({some}); {hint}")
        if server.weighting != "uniform":
            raise ConfigError(f"aggregate.weighting: got {server.weighting!r}, expected 'uniform' with privacy")
        super().check(method, setting)

    def start(self, server: Server) -> Server:
        seed = {"seed": torch.tensor(secrets.randbits(62))} if self.secret else {}
        state = {"clip": _number(self.clip), **seed}
        return dataclasses.replace(server, extra={**server.extra, STATE: state})

    def ended(self, server: Server, cohort: int) -> str | None:
        if self.epsilon is None or self._spent(server, cohort) <= self.epsilon:
            return None
        return f"the privacy budget of epsilon = {self.epsilon:g} is spent"

    def aggregate(self, rule: Averages, server: Server, arrivals: Arrivals) -> Changes:
        state = dict(server.extra[STATE])
        bound, within, noise = float(state["clip"]), list[bool](), self.noise or 0.0
        changes = rule.aggregate(server, _clipped(arrivals, bound, within))
        rng = torch_rng(self.seed(server), Purpose.PRIVACY, server.round)
        if self.quantile is not None:
            count_noise = self.count_noise or max(rule.cohort / 20, noise)
            disturbed = count_noise * float(torch.randn((), generator=rng)) if noise else 0.0
            share = 0.5 + (sum(within) - len(within) / 2 + disturbed) / rule.cohort
            change = -self.clip_rate * (share - self.quantile)
            state["clip"] = _number(bound * math.exp(min(max(change, -LARGEST_CHANGE), LARGEST_CHANGE)))
            noise = (noise**-2 - (2 * count_noise) ** -2) ** -0.5 if noise else 0.0
        mean = _noisy(server, changes.shared, rule.cohort / _clients(server), noise * bound, rng)
        spent = {"clip": bound, "noise": self.noise or 0.0}
        spent |= {"epsilon": self._spent(server, rule.cohort)} if noise else {}
        return dataclasses.replace(
            changes, shared=mean, extra={**changes.extra, STATE: state}, unit=1.0, records={"privacy": {"spent": spent}}
        )

    def _spent(self, server: Server, cohort: int) -> float:
        """What all rounds spend, with the next one."""
        rounds = server.round + 1
        return epsilon_of(self.noise or 0.0, self.delta, self.sampling, cohort, _clients(server), rounds)


def _noisy(server: Server, mean: CoveredMean, share: float, deviation: float, rng: torch.Generator) -> CoveredMean:
    """The noisy sums over the expected numbers of holders, which a share of the fleet has."""
    values, weight = Tensors(), Tensors()
    for name in sorted(server.layout.parameters):
        held = [(slice_, float(n)) for slice_, n in server.population.values() if name in slice_.index]
        if not held:
            continue
        weight[name] = expected = spread(server.layout, name, held) * share
        noise = torch.randn(server.layout.shapes[name], generator=rng) * deviation
        if name in mean.values:
            noise += mean.values[name] * mean.weight[name].to(noise)  # the sum of what came
        values[name] = torch.where(expected > 0, noise / torch.where(expected > 0, expected, 1).to(noise), 0)
    return CoveredMean(values, weight)


def _clients(server: Server) -> int:
    return sum(count for _, count in server.population.values())


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _clipped(arrivals: Arrivals, bound: float, within: list[bool]) -> Iterator[list[Upload]]:
    """The uploads, none longer than the bound; notes which were not longer before."""
    for uploads in arrivals:
        clipped = []
        for upload in uploads:
            within.append((long := length(upload.update)) <= bound)
            shrunk = {name: value * (bound / long) for name, value in upload.update.items()} if long > bound else {}
            clipped.append(dataclasses.replace(upload, update=shrunk) if shrunk else upload)
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
