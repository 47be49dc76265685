"""What an upload must be before it touches a sum, and a round before it is kept; the same for all engines.

An upload has the names, shapes and types of its slice, values within bounds, and a norm that is not out of scale: the
scale is the running median of what clients of its level have sent, which less than half of them cannot move far.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from incofl.client import Upload
from incofl.config.schema import ValidationConfig
from incofl.errors import UploadError
from incofl.server import Server
from incofl.tensors import Tensors, all_bounded, one_thread, only
from incofl.upload import UploadStack

NORMS = "norms"  # the table of ``Server.states`` with the running norms

# Bound of the norm of a tensor in an upload. The server sums buffers, and squares updates (InCo, the norms it records)
# that it may have multiplied (FedNova by ratios of normalisers, InCo by theta): 1e4 times this norm, squared, is still
# a float32.
LARGEST_NORM = 1e15
REMEMBERED = 64  # norms of each kind whose median is the scale: some rounds of a cohort, so that it follows a schedule
FEWEST = 5  # norms of which a median is taken, so that two liars among them do not decide
MAJORITY = 3  # clients of a level of which one liar does not decide
LARGEST_LOSS = 1e4  # times the running median of the losses, or 1 if that is smaller: losses of learned data tend to 0

Norms = dict[str, float]  # of the parts of an upload, by part


class Validation:
    """Looks at the uploads of one round, with what the rounds before have taught."""

    def __init__(self, server: Server, settings: ValidationConfig | None = None) -> None:
        self._server, self._settings = server, settings or ValidationConfig()
        self._known: Mapping[str, Tensor] = server.states.get(NORMS, {})
        self._new: dict[str, list[float]] = {}
        self._medians: dict[tuple[str, int], float | None] = {}
        self._usual_loss = self._median("loss")
        self.clipped: list[dict[str, Any]] = []

    def accept(self, upload: Upload) -> Upload:
        """The upload as it may be added up, perhaps with a shorter update; refuses what cannot be believed."""
        norms = check(upload, self._server)
        self._check_loss(upload.client, upload.loss)
        factors, settings = dict[str, float](), self._settings
        self._remember(upload.level, upload.steps, upload.loss, norms)  # the median does not mind a few that are wrong
        for part, norm in norms.items() if settings.norm != "off" else ():
            if (bound := self._bound(part, upload, norm)) is None:
                continue
            if settings.norm == "reject" or part == "buffers":  # a shorter vector of statistics means nothing
                usual = f"{bound:.2g}, which is {settings.multiple:g} times what is usual"
                raise UploadError(
                    f"client {upload.client}: its {part} has a norm of {norm:.2g}, expected at most {usual}"
                )
            factors[part] = bound / norm
            self.clipped.append({"client": upload.client, "part": part, "norm": norm, "bound": bound})
        if not factors:
            return upload
        shorter: dict[str, Any] = {
            part: {name: value * factor for name, value in getattr(upload, part).items()}
            for part, factor in factors.items()
        }
        return dataclasses.replace(upload, **shorter)

    def accepts_all(self, stack: UploadStack) -> bool:
        """Whether nothing is wrong with any upload of a stack; if something is, each is looked at by itself."""
        values = [*stack.update.values(), *stack.extra.values(), *stack.buffers.values()]
        not_negative = only(stack.buffers, self._server.layout.not_negative)
        try:
            if stack:
                check(stack[0], self._server)  # of which all have the names, shapes and types
            for client, loss in zip(stack.clients, stack.losses, strict=True):
                self._check_loss(client, loss)
        except UploadError:
            return False
        if not all(steps > 0 for steps in stack.steps) or not all_bounded(values, LARGEST_NORM):
            return False
        if any(float(value.min()) < 0 for value in not_negative.values()):
            return False
        each = norms_of_each(stack)
        for upload, norms in zip(stack, each, strict=True) if self._settings.norm != "off" else ():
            if any(self._bound(part, upload, norm) is not None for part, norm in norms.items()):
                return False
        for steps, loss, norms in zip(stack.steps, stack.losses, each, strict=True):
            self._remember(stack.level, steps, loss, norms)
        return True

    def problem(self, after: Server, accepted: int) -> str | None:
        """Why the result of a round must not be kept, if it must not."""
        if accepted < (least := self._settings.least):
            return f"{accepted} valid upload(s), expected at least {least} (validation.least)"
        tables = [*after.private.values(), *after.extra.values(), *after.states.values()]
        if not all_bounded([value for table in (after.shared, *tables) for value in table.values()], LARGEST_NORM):
            return "its result is not finite, or too large to compute with"
        before, layout = self._server.shared, self._server.layout
        with one_thread():
            # In one order of memory: a resumed server has its tensors in another, and sums differ in the last bits.
            moves = (after.shared[name] - before[name] for name in sorted(layout.parameters))
            moved = [vector_norm(move.contiguous()) for move in moves]
            step = math.hypot(*map(float, moved))
        self._new.setdefault("step", []).append(step)
        most = self._settings.multiple * (self._median("step") or math.inf)
        if self._settings.norm != "off" and step > most > 0:
            return f"it moves the model by {step:.2g}, expected at most {most:.2g} (validation.multiple)"
        return None

    def state(self) -> Tensors:
        """The running norms after this round, a part of the server's state."""
        names = self._known.keys() | self._new.keys()
        before = {name: self._known[name].tolist() if name in self._known else [] for name in names}
        both = {name: [*before[name], *self._new.get(name, [])][-REMEMBERED:] for name in sorted(names)}
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in both.items()}

    def _remember(self, level: int, steps: int, loss: float, norms: Norms) -> None:
        for part, value in {**norms, "steps": float(steps)}.items():
            self._new.setdefault(f"{part} {level}", []).append(value)
        self._new.setdefault("loss", []).append(abs(loss))

    def _check_loss(self, client: int, loss: float) -> None:
        usual = self._usual_loss
        most = LARGEST_NORM if usual is None else LARGEST_LOSS * max(1.0, usual)
        if not abs(loss) <= most:
            raise UploadError(f"client {client}: its loss is {loss:.2g}, expected at most {most:.2g} in size")

    def _bound(self, part: str, upload: Upload, norm: float) -> float | None:
        """What the norm may be, if it is more: a multiple of the usual, and in proportion for more steps than usual."""
        usual, steps = self._usual(part, upload), self._usual("steps", upload)
        if not usual:
            return None
        multiple = self._settings.multiple
        bound = multiple * usual * min(max(1.0, upload.steps / steps if steps else 1.0), multiple)
        return bound if norm > bound else None

    def _usual(self, part: str, upload: Upload) -> float | None:
        """The median of the level, or of all levels; before there are enough, it follows from what the client was sent.

        Of a level with one or two clients it is that of all levels: its own would be what a single liar says.

        Nobody changes the model by more than it is, which is many times what an honest first turn does. Of statistics
        nothing is known before: they are those of the data, and start at 0 and 1 whatever these are.
        """
        key = part, upload.level
        if key not in self._medians:
            clients = self._server.population[upload.level][1] if upload.level in self._server.population else MAJORITY
            known = self._median(f"{part} {upload.level}") if clients >= MAJORITY or part == "steps" else None
            if known is None:
                known = self._of_all_levels(part, upload.level)
            if known is None and part == "update":
                held = upload.slice.look(self._server.state(upload.level))
                norms = _norms(list(only(held, self._server.layout.parameters).values()))
                known = math.hypot(*norms) / self._settings.multiple
            self._medians[key] = known
        return self._medians[key]

    def _median(self, name: str) -> float | None:
        return _median_of(self._known[name].tolist() if name in self._known else [])

    def _of_all_levels(self, part: str, level: int) -> float | None:
        """The median of all levels as if each had this size: norms grow with the root of the number of entries."""
        values: list[float] = []
        for name in sorted(name for name in self._known if name.startswith(f"{part} ")):
            scale = 1.0 if part == "steps" else self._root(level) / self._root(int(name.rpartition(" ")[2]))
            values += (self._known[name] * scale).tolist()
        return _median_of(values)

    def _root(self, level: int) -> float:
        """The root of the number of a level's parameters."""
        population, parameters = self._server.population, self._server.layout.parameters
        held = only(population[level][0].shapes, parameters) if level in population else {}
        return math.sqrt(sum(math.prod(shape) for shape in held.values())) or 1.0


def _median_of(values: Sequence[float]) -> float | None:
    return float(torch.tensor(values, dtype=torch.float64).median()) if len(values) >= FEWEST else None


def norms_of(upload: Upload) -> Norms:
    """The norms of the parts of an upload; they do not depend on the number of threads."""
    parts = {"update": upload.update, "extra": upload.extra, "buffers": _statistics(upload)}
    floats = {part: [x for x in values.values() if x.is_floating_point()] for part, values in parts.items() if values}
    each = iter(_norms([value for values in floats.values() for value in values]))
    return {part: math.hypot(*islice(each, len(values))) for part, values in floats.items()}


def _statistics(upload: Upload) -> Tensors:
    """The client's own and those of the smallest path in its model, which have the same names."""
    return upload.buffers | {f"{name} of the smallest": value for name, value in upload.smallest.items()}


def norms_of_each(stack: UploadStack) -> list[Norms]:
    """The norms of each upload of a stack."""
    parts = {"update": stack.update, "extra": stack.extra, "buffers": stack.buffers}
    found: dict[str, list[float]] = {}
    with one_thread():
        for part, values in parts.items():
            floats = [value.flatten(1).double() for value in values.values() if value.is_floating_point()]
            squares = [vector_norm(value, dim=1).square() for value in floats]
            if squares:
                found[part] = torch.stack(squares).sum(0).sqrt().tolist()
    return [{part: values[at] for part, values in found.items()} for at in range(len(stack))]


def _norms(values: Sequence[Tensor]) -> list[float]:
    """The norm of each tensor."""
    with one_thread():
        found: list[float] = torch.stack(torch._foreach_norm(list(values))).tolist() if values else []
    return found


def check(upload: Upload, server: Server) -> Norms:
    """Refuses what must not reach the server: wrong names, shapes or types, values out of bounds, no training.

    Returns:
        The norms of its parts.
    """
    who, why = f"client {upload.client}", "the training diverged, lower local.lr (or its data are not finite)"
    upload.slice.check(upload.update | upload.buffers, who)
    smallest = server.population[0][0].shapes if 0 in server.population else {}
    for part, table, shapes in (("extra", upload.extra, upload.slice.shapes), ("smallest", upload.smallest, smallest)):
        for name, value in table.items():
            if name not in server.shared or tuple(value.shape) != shapes.get(name):
                says = f"of shape {tuple(value.shape)}, expected {shapes.get(name, 'none')}"
                raise UploadError(f"{who}: its {part} holds {name!r:.100} {says}")
    for name, value in (
        *upload.update.items(),
        *upload.extra.items(),
        *upload.buffers.items(),
        *upload.smallest.items(),
    ):
        if value.dtype != (kind := server.shared[name].dtype):
            raise UploadError(f"{who}: {name!r} is of {value.dtype}, expected {kind}")
    if not isinstance(upload.steps, Integral) or upload.steps < 1:
        raise UploadError(f"{who}: trained on nothing; it has {upload.examples} example(s)")
    if not isinstance(upload.examples, Integral) or upload.examples < 0:
        raise UploadError(f"{who}: it has {upload.examples} examples, expected a number of them")
    if not math.isfinite(upload.normaliser) or upload.normaliser <= 0:
        raise UploadError(f"{who}: its normaliser is {upload.normaliser}, expected a positive number")
    parts = ("update of", upload.update), ("update of", upload.extra), ("buffer", _statistics(upload))
    norms, counters = norms_of(upload), [value for _, table in parts for value in table.values() if _counts(value)]
    # No tensor has a larger norm than all of its part; NaN is not bounded.
    if not all(norm <= LARGEST_NORM for norm in norms.values()) or not all_bounded(counters, LARGEST_NORM):
        for what, name, value in ((what, *entry) for what, values in parts for entry in values.items()):
            floats = value.to(torch.promote_types(value.dtype, torch.float32))  # counters are whole numbers
            if not vector_norm(floats) <= LARGEST_NORM:  # so that NaN is refused too
                most = float(value.abs().max())
                if not math.isfinite(most):
                    raise UploadError(f"{who}: its update is not finite; {why}")
                bound = f"values up to {most:.1e}, expected a norm of at most {LARGEST_NORM:.0e}"
                raise UploadError(f"{who}: its {what} {name!r} has {bound}; {why}")
    bounded = [only(table, server.layout.not_negative) for table in (upload.buffers, upload.smallest)]
    lowest = [value.reshape(-1) for table in bounded for value in table.values()]
    if lowest and float(torch.cat(lowest).min()) < 0:
        name, value = next((n, v) for table in bounded for n, v in table.items() if float(v.min()) < 0)
        raise UploadError(f"{who}: its buffer {name!r} has {float(value.min()):.2g}, expected nothing below 0")
    return norms


def _counts(value: Tensor) -> bool:
    """Whether a tensor is a counter, of whole numbers."""
    return not value.is_floating_point()
