"""How uploads become a mean: a part of every server rule, which robust and private ways replace."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from incofl.aggregate import Accumulator
from incofl.client import Setting, Upload
from incofl.errors import ConfigError
from incofl.layout import Layout
from incofl.server import Changes, Server

Arrivals = Iterable[Sequence[Upload]]


class Averages(Protocol):
    """A server rule, as its mean sees it."""

    @property
    def cohort(self) -> int:
        """Number of clients that take part in a round, or are expected to."""

    def aggregate(self, server: Server, arrivals: Arrivals) -> Changes:
        """Averages uploads at each position over its holders."""


@dataclass(frozen=True)
class Mean:
    """The plain mean: every upload counts as it is, when it arrives.

    A subclass may change uploads before they are averaged and the result afterwards (``aggregate``), or average the
    values of a position in another way (``accumulator``).
    """

    robust: ClassVar[bool] = False  # whether it replaces the plain mean
    keeps_uploads: ClassVar[bool] = False  # whether it needs all uploads of a round at once
    by_position: ClassVar[bool] = False  # whether it averages each position by itself, whatever its weight
    # Whether nothing but the result may depend on what clients send, so that it can be private
    confidential: ClassVar[bool] = False

    @property
    def poisson(self) -> bool:
        """Whether each client takes part by itself, with the same probability, and not in cohorts of one size."""
        return False

    @property
    def has_secret(self) -> bool:
        """Whether what it keeps in ``server.extra`` is for the owner of the run alone."""
        return False

    def seed(self, server: Server) -> int:
        """The seed of the cohorts."""
        return server.seed

    def check(self, method: Any, setting: Setting) -> None:
        """Refuses a method or model that it cannot be used for, with one clear line."""
        if self.robust and method.server.squares:
            raise ConfigError(f"coverage.kind: got 'signal', expected 'count' with {method.name}")
        if self.by_position and not method.server.only_means:
            raise ConfigError(f"method: got {method.name}, expected a method whose server rule is a mean")
        if self.by_position and method.server.weighting != "uniform":
            got = f"got {method.server.weighting!r}, expected 'uniform' with {method.name}"
            raise ConfigError(f"aggregate.weighting: {got}: every holder counts once")

    def start(self, server: Server) -> Server:
        """The server before the first round, with what this mean keeps in ``server.extra``."""
        return server

    def ended(self, server: Server, cohort: int) -> str | None:
        """Why there may be no more rounds, if that is so."""
        return None

    def accumulator(self, layout: Layout, dtype: torch.dtype) -> Accumulator:
        """What averages the values of every position."""
        return Accumulator(layout, dtype)

    def aggregate(self, rule: Averages, server: Server, arrivals: Arrivals) -> Changes:
        """What a rule makes of the uploads of a round."""
        return rule.aggregate(server, arrivals)

    def added_to(self, method: Any) -> Any:
        """A method with this mean."""
        if method.server.mean.robust:
            raise ConfigError(f"method: got {method.name}, expected one way to average, and not two")
        return dataclasses.replace(method, server=dataclasses.replace(method.server, mean=self))
