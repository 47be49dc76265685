"""The table of methods: one file per paper, one line per name."""

import dataclasses
from collections.abc import Iterator, Mapping

from incofl.errors import ConfigError, nearest
from incofl.inco import InCo
from incofl.method import Method
from incofl.methods.fedavg import alllarge, allsmall, fedavg, heteroavg
from incofl.methods.fednova import fednova, heteronova
from incofl.methods.fedprox import fedprox, heteroprox
from incofl.methods.fedrolex import fedrolex
from incofl.methods.heterofl import heterofl
from incofl.methods.inclusivefl import inclusivefl
from incofl.methods.moon import heteromoon, moon
from incofl.methods.noise import DeepNoise
from incofl.methods.scaffold import heteroscaffold, scaffold
from incofl.methods.scalefl import scalefl

_METHODS = (
    fedavg,
    heteroavg,
    fedprox,
    heteroprox,
    fednova,
    heteronova,
    scaffold,
    heteroscaffold,
    moon,
    heteromoon,
    heterofl,
    inclusivefl,
    fedrolex,
    scalefl,
    allsmall,
    alllarge,
)


# What the paper calls a hetero* method with InCo; other methods with InCo are called ``name+inco``.
_PAPER_NAMES = {f"hetero{name}": f"inco{name}" for name in ("avg", "prox", "nova", "scaffold", "moon")}


def _with_inco(method: Method) -> Method:
    extended = method.then(InCo())
    name = _PAPER_NAMES.get(method.name, extended.name)
    return dataclasses.replace(extended, name=name, summary=f"{method.name} with InCo Aggregation")


def _with_noise(method: Method) -> Method:
    return dataclasses.replace(
        method.then(DeepNoise()), summary=f"{method.name} with Gaussian noise where InCo mixes, for comparison"
    )


_INCO = {method.name: _with_inco(method) for method in _METHODS if method.extensible}
# A baseline of the paper for the methods that it extends.
_NOISE = [_with_noise(method) for method in _METHODS if method.name in _PAPER_NAMES]
_TABLE = {method.name: method for method in (*_METHODS, *_INCO.values(), *_NOISE)}


class MethodTable(Mapping[str, Method]):
    """Methods by name, in any case; ``name+inco`` adds InCo to a method that can take it."""

    def __getitem__(self, name: str) -> Method:
        base, plus, transform = name.lower().partition("+")
        if plus and transform == "inco" and base in _INCO:
            return _INCO[base]
        return _TABLE[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)


METHODS = MethodTable()


def find_method(name: str) -> Method:
    """The method of that name, or one clear line with the nearest name."""
    try:
        return METHODS[name]
    except KeyError:
        base, _, transform = name.lower().partition("+")
        hint = nearest(name, METHODS)
        if base in METHODS and transform == "inco":
            hint = (
                "; InCo mixes the layers of one shared server model, which this method does not have or mixes already"
            )
        raise ConfigError(f"method: got {name!r}{hint}") from None
