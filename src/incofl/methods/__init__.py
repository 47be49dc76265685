"""The table of methods: one file per paper, one line per name."""

from collections.abc import Iterator, Mapping

from incofl.errors import ConfigError, nearest
from incofl.inco import InCo
from incofl.method import Method
from incofl.methods.fedavg import alllarge, allsmall, fedavg, heteroavg, incoavg

_TABLE = {method.name: method for method in (fedavg, heteroavg, incoavg, allsmall, alllarge)}


class MethodTable(Mapping[str, Method]):
    """Methods by name, in any case; ``name+inco`` adds InCo to a method that can take it."""

    def __getitem__(self, name: str) -> Method:
        base, plus, transform = name.lower().partition("+")
        if base not in _TABLE or (plus and transform != "inco"):
            raise KeyError(name)
        method = _TABLE[base]
        if not plus:
            return method
        if not method.extensible:
            raise KeyError(name)
        return method.then(InCo())

    def __iter__(self) -> Iterator[str]:
        for name, method in _TABLE.items():
            yield name
            if method.extensible:
                yield f"{name}+inco"

    def __len__(self) -> int:
        return sum(1 for _ in self)


METHODS = MethodTable()


def find_method(name: str) -> Method:
    """The method of that name, or one clear line with the nearest name."""
    try:
        return METHODS[name]
    except KeyError:
        hint = nearest(name, METHODS)
        if name.lower().removesuffix("+inco") in METHODS and name.lower().endswith("+inco"):
            hint = "; InCo mixes the layers of one shared server model, which this method does not have or mixes already"
        raise ConfigError(f"method: got {name!r}{hint}") from None
