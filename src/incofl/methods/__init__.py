"""The table of methods: one file per paper, one line per name. A method is imported when it is asked for."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from incofl.errors import ConfigError, nearest
from incofl.imports import load_attribute

if TYPE_CHECKING:
    from incofl.method import Method

# Each method with its file and a summary. Levels share one server model in all but the first group.
_SEPARATE = {
    "fedavg": ("fedavg", "FedAvg: each size is averaged with itself only"),
    "fedprox": ("fedprox", "FedProx: each size with itself only"),
    "fednova": ("fednova", "FedNova: each size with itself only"),
    "scaffold": ("scaffold", "Scaffold: each size with itself only"),
    "moon": ("moon", "MOON: each size with itself only"),
    "feddyn": ("feddyn", "FedDyn: each size with itself only"),
    "fedbn": ("fedbn", "FedBN: each size with itself only"),
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
    "heterodyn": ("feddyn", "FedDyn over slices of one server model"),
    "heterobn": ("fedbn", "FedBN over slices of one server model"),
    "fedfloor": ("fedfloor", "FedFloor: the smallest size as if everybody trained it; larger ones add to it"),
    "heterofl": ("heterofl", "HeteroFL: the first channels of every layer"),
    "inclusivefl": ("inclusivefl", "InclusiveFL: a last block and a head of each size's own"),
    "fedrolex": ("fedrolex", "FedRolex: HeteroFL with a rolling window of channels"),
    "fedrand": ("fedrand", "random width: channels drawn for each client and round"),
    "fedecover": ("fedecover", "FedEcover: random width from pools that cover all channels"),
    "fiarse": ("fiarse", "FIARSE: the entries of largest magnitude; no cheaper for small clients"),
    "fjord": ("fjord", "FjORD: clients train all widths up to their own"),
    "nefl": ("nefl", "NeFL: residual branches with learned steps, of each level's own"),
    "depthfl": ("depthfl", "DepthFL: fewer blocks, with exits that teach each other"),
    "reefl": ("reefl", "ReeFL: exits of a ViT that share one classifier"),
    "scalefl": ("scalefl", "ScaleFL: fewer blocks and fewer channels, with early exits"),
}
# Low-rank adapters on a frozen model, of which levels hold some ranks.
_ADAPTERS = {
    "fedit": ("lora", "FedIT: everybody trains the smallest rank; means of the factors"),
    "covered": ("lora", "the mean of each rank over those that hold it"),
    "hetlora": ("lora", "HetLoRA: factors padded with zeros, clients weighed by the norms of their products"),
    "random-ranks": ("lora", "Fed-PLoRA: a client trains random ranks, beside all others"),
    "flexlora": ("lora", "FlexLoRA: the mean of the products, cut into ranks by an SVD"),
    "raflora": ("lora", "raFLoRA: the mean of the products of each band of ranks, cut by an SVD"),
    "flora": ("lora", "FLoRA: the mean of the products is added to the model, and adapters start anew"),
    "ffa": ("lora", "FFA-LoRA: A stays as it starts"),
    "rolora": ("lora", "RoLoRA: A and B are trained in turn"),
    "fedex": ("lora", "FedEx-LoRA: what the means of the factors miss is added to the model"),
}
ADAPTERS = frozenset(_ADAPTERS)
_BASES = _SEPARATE | _SHARED | _ADAPTERS
# What a fleet of unequal devices can do, in plain words: without slices of one model, and with them.
BASELINES = {
    "allsmall": "everybody trains the smallest size",
    "largestonly": "only devices that hold the largest size take part",
    "fedavg": "each size is averaged with itself only",
}
SLICES = {
    "heteroavg": "slices of one model",
    "incoavg": "slices of one model, deep layers mixed by InCo",
    "fedfloor": "slices of one model on the smallest, which all train",
}
RECOMMENDED = "fedfloor"  # its smallest devices get what they would get if everybody trained their size
FOR_EQUALS = "fedavg"  # what is recommended where all devices hold the same size
# What ``NAME+TRANSFORM`` adds to a method. The first two mix or disturb the layers of one shared server model.
_TRANSFORMS = {
    "inco": ("incofl.inco:InCo", "InCo Aggregation"),
    "noise": ("incofl.methods.noise:DeepNoise", "Gaussian noise where InCo mixes, for comparison"),
    "deepscale": ("incofl.methods.deepscale:DeepScale", "the layers that InCo mixes times a constant, for comparison"),
    "coverage": ("incofl.methods.coverage:Coverage", "shorter steps for what few clients hold"),
    "anchor": ("incofl.anchor:Anchor", "the smallest path trained by all"),
    "clipping": ("incofl.methods.clipping:Clipping", "uploads of bounded length"),
    "centred": ("incofl.methods.clipping:Centred", "uploads within a bound around the last mean"),
    "trimmed": ("incofl.methods.trimmed:Trimmed", "means without the extremes of each position"),
    "median": ("incofl.methods.trimmed:Median", "the median of each position"),
    "krum": ("incofl.methods.krum:Krum", "the clients of each level that agree best (multi-Krum)"),
    "geomedian": ("incofl.methods.krum:GeometricMedian", "the geometric median of each level"),
    "holders": ("incofl.methods.holders:Holders", "no free step for what few clients hold"),
    "privacy": ("incofl.methods.privacy:Privacy", "client-level differential privacy"),
    "momentum": ("incofl.methods.server_optimizers:ServerMomentum", "momentum on the server"),
    "adam": ("incofl.methods.server_optimizers:ServerAdam", "Adam on the server"),
    "yogi": ("incofl.methods.server_optimizers:ServerYogi", "Yogi on the server"),
}
# What the paper calls a hetero* method with InCo, and in the same way others.
_PAPERS = ("avg", "prox", "nova", "scaffold", "moon")
_PAPER_NAMES = {f"hetero{name}+inco": f"inco{name}" for name in (*_PAPERS, "dyn", "bn")}
_MEANINGS = {short: long for long, short in _PAPER_NAMES.items()}
# FedOpt: FedAvg with an optimiser on the server, whose step comes after all else.
_FEDOPT = {
    f"{form}{name}": (f"{form}avg", optimizer)
    for name, optimizer in (("avgm", "momentum"), ("adam", "adam"), ("yogi", "yogi"))
    for form in ("fed", "hetero", "inco")
}


def _parts(name: str) -> list[str]:
    """A method and what is added to it: ``incoavg+adam`` is ``heteroavg``, ``inco``, ``adam``."""
    base, *added = name.lower().split("+")
    base, *last = _FEDOPT.get(base, (base,))
    return [*_MEANINGS.get(base, base).split("+"), *added, *last]


def _summary(name: str) -> str:
    base, *added = _parts(name)
    return f"{base} with {' and '.join(_TRANSFORMS[key][1] for key in added)}" if added else _BASES[base][1]


_WITH_INCO = [_PAPER_NAMES.get(f"{name}+inco", f"{name}+inco") for name in _SHARED]
_WITH_NOISE = [f"hetero{name}+noise" for name in _PAPERS]  # a baseline of the paper
SUMMARIES = {name: _summary(name) for name in (*_BASES, *_FEDOPT, *_WITH_INCO, *_WITH_NOISE)}


class MethodTable(Mapping[str, "Method"]):
    """Methods by name, in any case; ``name+inco`` and other transforms extend a method."""

    def __getitem__(self, name: str) -> "Method":
        try:
            return _named(name)
        except ConfigError as problem:
            raise KeyError(str(problem)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


METHODS = MethodTable()


def _named(name: str) -> "Method":
    base, *added = _parts(name)
    if base not in _BASES:
        names = [known for known in METHODS if "+" not in known]
        raise ConfigError(f"method: got {name!r}{nearest(name.partition('+')[0], names)}")
    if unknown := [word for word in added if word not in _TRANSFORMS]:
        left, before = set(_TRANSFORMS) - set(added), name.lower().partition(unknown[0])[0]
        raise ConfigError(f"method: got {name!r}{nearest(unknown[0], left, before)}")
    method, alias = _load(base, *added), name.lower()
    return dataclasses.replace(method, name=alias) if alias.partition("+")[0] in _FEDOPT else method


@functools.cache
def _load(base: str, *added: str) -> "Method":
    method: Method = load_attribute(f"incofl.methods.{_BASES[base][0]}:{base.replace('-', '_')}", "method")
    long = "+".join((base, *added))
    short = next((long.replace(full, name) for full, name in _PAPER_NAMES.items() if long.startswith(full)), long)
    return dataclasses.replace(_extended(method, added, short), summary=_summary(long))


def _extended(method: "Method", added: Sequence[str], name: str) -> "Method":
    """A method with what the words after its name add, under another name."""
    if unknown := [key for key in added if key not in _TRANSFORMS]:
        raise ConfigError(f"method: got {method.name}+{unknown[0]}{nearest(unknown[0], _TRANSFORMS)}")
    method = dataclasses.replace(method, name=name)
    for key in added:
        part = load_attribute(_TRANSFORMS[key][0], "method")()
        if hasattr(part, "added_to"):
            method = part.added_to(method)
        else:
            method = dataclasses.replace(method, transforms=(*method.transforms, part))
    return method


def find_method(method: "str | Method") -> "Method":
    """A method by name or as an object, with noise on uploads and the server's step in it, unless it has its own."""
    from incofl.method import Method
    from incofl.methods.noise import UploadNoise
    from incofl.methods.server_optimizers import ServerSchedule

    if isinstance(method, str):
        if ":" not in method:
            return find_method(_named(method))
        place, *added = method.split("+")
        own: Method = load_attribute(place, "method", Method)
        return find_method(_extended(own, added, "+".join((own.name, *added))))
    uploads, transforms = method.uploads, method.transforms
    if not any(isinstance(transform, UploadNoise) for transform in uploads):
        uploads = method.options.get("noise", UploadNoise()), *uploads
    if not any(transform.name == ServerSchedule.name for transform in transforms):
        transforms = ServerSchedule(), *transforms
    return dataclasses.replace(method, uploads=uploads, transforms=transforms)


@functools.cache
def all_options() -> dict[str, Any]:
    """The default options of every method and transform, by the name of their section in a config."""
    names = [*_BASES, *(f"heteroavg+{part}" for part in _TRANSFORMS)]
    return {section: options for name in names for section, options in find_method(name).options.items()}
