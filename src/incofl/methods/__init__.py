"""The table of methods: one file per paper, one line per name. A method is imported when it is asked for."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from incofl.errors import ConfigError, nearest
from incofl.imports import load_attribute

if TYPE_CHECKING:
    from incofl.method import Method, UploadTransform

# Each method with its file and a summary. Levels share one server model in all but the first group.
_SEPARATE = {
    "fedavg": ("fedavg", "FedAvg: each size is averaged with itself only"),
    "fedprox": ("fedprox", "FedProx: each size with itself only"),
    "fednova": ("fednova", "FedNova: each size with itself only"),
    "scaffold": ("scaffold", "Scaffold: each size with itself only"),
    "moon": ("moon", "MOON: each size with itself only"),
    "allsmall": ("fedavg", "FedAvg where everybody trains the smallest size"),
    "alllarge": ("fedavg", "FedAvg where everybody trains the largest size"),
    "largestonly": ("fedavg", "FedAvg of the clients that can hold the largest size"),
}
_SHARED = {
    "heteroavg": ("fedavg", "FedAvg over slices of one server model"),
    "heteroprox": ("fedprox", "FedProx over slices of one server model"),
    "heteronova": ("fednova", "FedNova over slices of one server model"),
    "heteroscaffold": ("scaffold", "Scaffold over slices of one server model"),
    "heteromoon": ("moon", "MOON over slices of one server model"),
    "heterofl": ("heterofl", "HeteroFL: the first channels of every layer"),
    "inclusivefl": ("inclusivefl", "InclusiveFL: a last block and a head of each size's own"),
    "fedrolex": ("fedrolex", "FedRolex: HeteroFL with a rolling window of channels"),
    "scalefl": ("scalefl", "ScaleFL: fewer blocks and fewer channels, with early exits"),
}
_BASES = _SEPARATE | _SHARED
# What ``NAME+TRANSFORM`` adds to a method. The first two mix or disturb the layers of one shared server model.
_TRANSFORMS = {
    "inco": ("incofl.inco:InCo", "InCo Aggregation"),
    "noise": ("incofl.methods.noise:DeepNoise", "Gaussian noise where InCo mixes, for comparison"),
    "scaled": ("incofl.methods.scaled:Scaled", "the layers that InCo mixes times a constant, for comparison"),
    "coverage": ("incofl.methods.coverage:Coverage", "shorter steps for what few clients hold"),
    "anchor": ("incofl.anchor:Anchor", "the smallest path trained by all"),
    "momentum": ("incofl.methods.server_optimizers:ServerMomentum", "momentum on the server"),
    "adam": ("incofl.methods.server_optimizers:ServerAdam", "Adam on the server"),
    "yogi": ("incofl.methods.server_optimizers:ServerYogi", "Yogi on the server"),
}
# What the paper calls a hetero* method with InCo.
_PAPER_NAMES = {f"hetero{name}+inco": f"inco{name}" for name in ("avg", "prox", "nova", "scaffold", "moon")}
_MEANINGS = {short: long for long, short in _PAPER_NAMES.items()}


def _parts(name: str) -> list[str]:
    """A method and what is added to it: ``incoavg+adam`` is ``heteroavg``, ``inco``, ``adam``."""
    base, *added = name.lower().split("+")
    return [*_MEANINGS.get(base, base).split("+"), *added]


def _summary(name: str) -> str:
    base, *added = _parts(name)
    return f"{base} with {' and '.join(_TRANSFORMS[key][1] for key in added)}" if added else _BASES[base][1]


_WITH_INCO = [_PAPER_NAMES.get(f"{name}+inco", f"{name}+inco") for name in _SHARED]
_WITH_NOISE = [f"{long.removesuffix('+inco')}+noise" for long in _PAPER_NAMES]  # a baseline of the paper
SUMMARIES = {name: _summary(name) for name in (*_BASES, *_WITH_INCO, *_WITH_NOISE)}


class MethodTable(Mapping[str, "Method"]):
    """Methods by name, in any case; ``name+inco`` and other transforms extend a method."""

    def __getitem__(self, name: str) -> "Method":
        base, *added = _parts(name)
        known = base in _BASES and set(added) <= _TRANSFORMS.keys() and len(set(added)) == len(added)
        if not known or (base in _SEPARATE and {"inco", "noise", "scaled", "anchor"} & set(added)):
            raise KeyError(name)
        return _load(base, *added)

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


@functools.cache
def _load(base: str, *added: str) -> "Method":
    from incofl.methods.noise import UploadNoise
    from incofl.methods.server_optimizers import ServerSchedule

    method: Method = load_attribute(f"incofl.methods.{_BASES[base][0]}:{base}", "method")
    long = "+".join((base, *added))
    short = next((long.replace(full, name) for full, name in _PAPER_NAMES.items() if long.startswith(full)), long)
    uploads: tuple[UploadTransform, ...] = (UploadNoise(), *method.uploads)
    own = ServerSchedule(), *method.transforms
    parts = {key: load_attribute(_TRANSFORMS[key][0], "method")() for key in added}
    anchor = parts.pop("anchor", method.anchor)
    transforms = *own, *parts.values()
    method = dataclasses.replace(method, name=short, summary=_summary(long), uploads=uploads, transforms=transforms)
    return dataclasses.replace(method, anchor=anchor)


METHODS = MethodTable()


def find_method(name: str) -> "Method":
    """The method of that name, or your own as ``package.module:attribute``; else one line with the nearest name."""
    from incofl.method import Method

    method = load_attribute(name, "method") if ":" in name else METHODS.get(name)
    if isinstance(method, Method):
        return method
    if ":" in name:
        raise ConfigError(f"method: {name} is of type {type(method).__name__}, expected a Method")
    base, *added = name.lower().split("+")
    hint = nearest(name, METHODS)
    if base in METHODS and added and set(added) <= _TRANSFORMS.keys():
        hint = "; InCo mixes one server model for all sizes, which this method does not have or mixes already"
    raise ConfigError(f"method: got {name!r}{hint}")


@functools.cache
def all_options() -> dict[str, Any]:
    """The default options of every method and transform, by the name of their section in a config."""
    names = [*_SEPARATE, *("+".join((base, *_TRANSFORMS)) for base in _SHARED)]
    return {section: options for name in names for section, options in METHODS[name].options.items()}
