"""Who holds which training examples: ``iid``, ``dirichlet`` (as in the paper), ``natural`` or ``virtual``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from incofl.errors import DataError

Stream = Callable[[int], np.random.Generator]  # a client's own random stream
LEAST_EXAMPLES = 10  # the paper redraws until every client has as many
MOST_DRAWS = 2_000


def make_partition(
    labels: Tensor, clients: int, kind: Literal["iid", "dirichlet"], alpha: float, rng: np.random.Generator
) -> list[Tensor]:
    """For each client the indices of its examples; every index is given to exactly one client."""
    if clients > len(labels):
        raise DataError(f"data.clients: got {clients}, expected at most {len(labels)}, the number of training examples")
    if kind == "iid":
        parts = np.array_split(rng.permutation(len(labels)), clients)
    else:
        _check_classes(labels, kind)
        parts = _dirichlet(labels.numpy(), clients, alpha, rng)
    return [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]


def _check_classes(labels: Tensor, kind: str) -> None:
    if labels.dim() > 1 or labels.is_floating_point():
        raise DataError(f"data.partition: got {kind!r}, expected 'natural' or 'iid': examples have no class each")


def natural_partition(groups: Tensor | None, clients: int, rng: np.random.Generator) -> list[Tensor]:
    """One client for each of the groups with the most examples, in a random order; other examples are not used."""
    if groups is None:
        raise DataError("data.partition: got 'natural', expected 'dirichlet', 'iid' or 'virtual': nobody made the data")
    sizes = torch.bincount(groups)
    found = int((sizes > 0).sum())
    if clients > found:
        raise DataError(f"data.clients: got {clients}, expected at most {found}, the parts that the data set comes in")
    largest = torch.sort(sizes, descending=True, stable=True).indices[:clients]
    return [torch.nonzero(groups == largest[at]).flatten() for at in rng.permutation(clients)]


class VirtualPartition(Sequence[Tensor]):
    """A population of any size over a fixed pool of examples; a client costs nothing until it is asked for.

    A client draws p ~ Dirichlet(alpha), then its examples by these shares of the labels; clients may share examples.
    """

    def __init__(self, labels: Tensor, clients: int, alpha: float, examples: int, stream: Stream) -> None:
        _check_classes(labels, "virtual")
        self._sorted = np.argsort(labels.numpy(), kind="stable")  # the examples of class 0, then those of class 1, ...
        self._sizes = np.bincount(labels.numpy())
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._clients, self._alpha, self.examples, self._stream = clients, alpha, examples, stream
        self._last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._clients

    def __getitem__(self, client: Any) -> Any:  # one client, or a list of those of a slice
        if isinstance(client, slice):
            return [self[c] for c in range(*client.indices(len(self)))]
        if not 0 <= client < len(self):
            raise IndexError(client)
        last = self._last
        if last is not None and last[0] == client:
            return last[1]
        rng = self._stream(client)
        counts = rng.multinomial(self.examples, rng.dirichlet(np.full(len(self._sizes), self._alpha)))
        drawn = rng.integers(0, np.repeat(self._sizes, counts))
        self._last = client, torch.from_numpy(self._sorted[np.repeat(self._starts, counts) + drawn])
        return self._last[1]


def _dirichlet(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Each class is dealt out in shares p ~ Dirichlet(alpha), skipping clients that already hold their fair share.

    Redrawn until everybody has 10 examples, or half a fair share where data are scarcer than that.
    """
    classes = np.unique(labels)
    least = max(1, min(LEAST_EXAMPLES, len(labels) // (2 * clients)))
    for _ in range(MOST_DRAWS):
        members = [rng.permutation(np.flatnonzero(labels == c)) for c in classes]
        held = np.zeros(clients, dtype=np.int64)
        cuts = []
        for indices in members:
            shares = rng.dirichlet(np.full(clients, alpha)) * (held < len(labels) / clients)
            if not shares.sum() > 0:  # all shares fell to clients that are full: draw everything again
                break
            cut = (np.cumsum(shares / shares.sum())[:-1] * len(indices)).astype(np.int64)
            cuts.append(cut)
            held += np.diff(cut, prepend=0, append=len(indices))
        if len(cuts) == len(classes) and held.min() >= least:
            pieces = [np.split(indices, cut) for indices, cut in zip(members, cuts, strict=True)]
            return [rng.permutation(np.concatenate(own)) for own in zip(*pieces, strict=True)]
    reason = f"{MOST_DRAWS} draws gave somebody fewer than {least} of the {len(labels)} examples"
    raise DataError(f"data.alpha: got {alpha} for {clients} clients; {reason}; raise data.alpha or lower data.clients")
