"""The configuration of a run: a tree of dataclasses that mirrors the TOML file, checked field by field."""

import dataclasses
import hashlib
import json
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le, Lt

from incofl.client import LocalSettings
from incofl.data import find_source
from incofl.errors import ConfigError
from incofl.inco import InCo
from incofl.method import BufferPolicy, Weighting
from incofl.methods import find_method
from incofl.methods.fedprox import FedProx
from incofl.methods.fedrolex import Rolex
from incofl.methods.heterofl import HeteroFLOptions
from incofl.methods.inclusivefl import InclusiveOptions
from incofl.methods.moon import Moon
from incofl.methods.noise import NoiseOptions
from incofl.methods.scaffold import Scaffold
from incofl.methods.scalefl import ScaleFL
from incofl.models import find_family
from incofl.models.resnet import Stem
from incofl.split import Kind

Count = Annotated[int, Ge(1)]
# Keys that may change when a run is resumed, for they cannot change its results.
UNBOUND = frozenset(
    {
        *("rounds", "data.root", "engine.executor", "engine.workers", "engine.address"),
        *("engine.trace", "engine.client_memory", "record.every", "record.window", "record.tensorboard"),
    }
)


@dataclass(frozen=True)
class DataConfig:
    """Which data, and who holds them.

    Attributes:
        name: the data set (``incofl list datasets``).
        root: the folder that holds its files; the embedded digits need none.
        partition: ``dirichlet`` (label skew), ``iid``, ``natural`` (the parts that the data set comes in, such as
            speaking roles: those with the most examples), ``virtual`` (a population of any size whose clients draw
            ``examples`` examples each from the data set, with a Dirichlet label mix of their own), or what suits the
            data set.
        alpha: concentration of the Dirichlet partition; small is very uneven, large is even.
        clients: size of the population.
        limit: use only so many training examples, drawn by the seed.
        examples: of each client of a virtual partition.
        side: pixels of the side of images as the model sees them; left out, what suits the model.
    """

    name: str = "digits"
    root: str = "data"
    partition: Literal["iid", "dirichlet", "natural", "virtual", "auto"] = "auto"
    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.5
    clients: Count = 20
    limit: Count | None = None
    examples: Count = 100
    side: Annotated[int, Ge(4), Le(1024)] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The server model, named by the largest member of its family.

    Attributes:
        name: the model (``incofl list models``), one of your own as ``package.module:factory``, or what suits the data
            set.
        width: multiplier of all channel numbers of the server model; left out, it suits the data set.
        stem: of ResNets: ``imagenet`` (7x7, stride 2, pooling: the paper's), ``small`` (3x3), or what suits the data.
        depth: blocks of a ViT or text transformer, layers of an LSTM; left out, as its name says.
        dim: width of its residual stream or hidden state, likewise.
        heads: of its attention, likewise.
        patch: side of a ViT's patches in pixels; left out, 16, or an eighth of the side of small images.
        pretrained: initial weights: a safetensors file, or a name on the Hugging Face Hub.
    """

    name: str = "auto"
    width: Annotated[float, Gt(0), Le(4)] | None = None
    stem: Stem | Literal["auto"] = "auto"
    depth: Count | None = None
    dim: Count | None = None
    heads: Count | None = None
    patch: Count | None = None
    pretrained: str | None = None


@dataclass(frozen=True)
class SplitConfig:
    """The sizes of client models.

    Attributes:
        kind: ``stage`` (first blocks of each stage), ``layer`` (first blocks of all), ``hetero`` (narrower layers), or
            what the method is made for.
        levels: how many sizes, or one entry per size from small to large: blocks per stage such as ``[1, 1, 2, 2]``
            (stage), a number of blocks (layer), a share of the channels (hetero). Left out, five, or what the model
            has.
        depth: of hetero splitting: ``full``, ``scaled`` (the same share of the blocks), or blocks per stage per level.
        counts: clients of each level; left out, groups are equal. The first clients are the smallest.
    """

    kind: Kind | Literal["auto"] = "auto"
    levels: Count | tuple[int | float | tuple[int, ...], ...] | Literal["auto"] = "auto"
    depth: Literal["full", "scaled"] | tuple[int | tuple[int, ...], ...] = "full"
    counts: tuple[Annotated[int, Ge(0)], ...] | None = None


@dataclass(frozen=True)
class AggregateConfig:
    """How the server averages.

    Attributes:
        weighting: ``uniform`` over the clients that hold a position (the paper's code), by ``samples``, or the
            method's own.
        precision: of the running sums.
        server_lr: by what the aggregated update is multiplied before transforms see it; ``1/epochs``: as the paper's
            code does for ViTs.
    """

    weighting: Weighting | Literal["auto"] = "auto"
    precision: Literal["float32", "float64"] = "float32"
    server_lr: Annotated[float, Gt(0), Le(100)] | Literal["1/epochs"] = 1.0


@dataclass(frozen=True)
class EngineConfig:
    """Where turns are computed.

    Attributes:
        executor: ``processes`` of this machine, ``ray`` (actors on a Ray cluster, see docs/cluster.md; needs the extra
            ``ray``), or ``auto``: processes, and this process alone where ``workers`` is 1.
        workers: processes that train clients, each on one core; 1: in this process; ``auto``: what is fastest, or as
            many as the environment variable ``INCOFL_WORKERS`` says; on a cluster, one per core.
        address: of a running Ray cluster: ``auto``, ``HOST:6379`` or ``ray://HOST:10001``; left out, Ray is started on
            this machine.
        device: torch device of the clients' training; devices other than ``cpu`` are untested.
        compile: train with ``torch.compile``: faster steps, after a minute or so for each level at the start of every
            process; needs a C++ compiler.
        trace: write a timeline of the run, ``trace.json``, for Perfetto or chrome://tracing.
        client_memory: bytes of what clients remember that are kept in memory; the rest is on disk.
    """

    executor: Literal["auto", "processes", "ray"] = "auto"
    workers: Count | Literal["auto"] = "auto"
    address: str | None = None
    device: str = "cpu"
    compile: bool = False
    trace: bool = False
    client_memory: Count = 2**30


@dataclass(frozen=True)
class EvalConfig:
    """When the server model is evaluated.

    Attributes:
        every: evaluate after every so many rounds; the last round always is.
        limit: use only so many test examples, drawn by the seed.
        measured: training images, drawn by the seed, on which static batch-norm statistics are measured.
    """

    every: Count = 1
    limit: Count | None = None
    measured: Count = 5000


@dataclass(frozen=True)
class RecordConfig:
    """What a run keeps for later analysis (``incofl analyze``) and for onlookers besides its last state.

    Attributes:
        every: keep the server's state before the first and after every so many rounds; 0: only the last.
        window: the first and the last of some rounds after each of which the state is kept too, such as ``[40, 50]``.
        tensorboard: write TensorBoard event files into the run folder; needs the extra ``tensorboard``.
    """

    every: Annotated[int, Ge(0)] = 0
    window: tuple[Count, Count] | None = None
    tensorboard: bool = False

    def keeps(self, round: int) -> bool:
        """Whether the state after so many rounds is kept."""
        in_window = self.window is not None and self.window[0] <= round <= self.window[1]
        return in_window or (self.every > 0 and round % self.every == 0)


@dataclass(frozen=True)
class Config:
    """A run, completely.

    Attributes:
        seed: of every random stream: initial weights, partition, cohorts, batches, augmentation.
        rounds: how many.
        method: the method (``incofl list methods``).
        cohort: clients per round: a count, or a ratio below 1.
        buffers: batch-norm statistics: ``per-level`` (each size has its own), ``average`` over all (the paper),
            ``static`` (measured for each size before an evaluation, on training images), or the method's own.
    """

    seed: Annotated[int, Ge(0)] = 0
    rounds: Count = 50
    method: str = "incoavg"
    cohort: Count | Annotated[float, Gt(0), Lt(1)] = 0.4
    buffers: BufferPolicy | Literal["auto"] = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    local: LocalSettings = field(default_factory=LocalSettings)
    inco: InCo = field(default_factory=InCo)
    prox: FedProx = field(default_factory=FedProx)
    scaffold: Scaffold = field(default_factory=Scaffold)
    moon: Moon = field(default_factory=Moon)
    heterofl: HeteroFLOptions = field(default_factory=HeteroFLOptions)
    rolex: Rolex = field(default_factory=Rolex)
    scalefl: ScaleFL = field(default_factory=ScaleFL)
    inclusive: InclusiveOptions = field(default_factory=InclusiveOptions)
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    record: RecordConfig = field(default_factory=RecordConfig)

    def __post_init__(self) -> None:
        """Checks what concerns more than one field, and fills in what follows from the data set."""
        source = find_source(self.data.name)
        method = find_method(self.method)
        name = source.model if self.model.name == "auto" else self.model.name
        family = find_family(name)
        if self.cohort > self.data.clients:
            raise ConfigError(f"cohort: got {self.cohort:g}, expected at most data.clients = {self.data.clients}")
        if self.split.counts is not None and sum(self.split.counts) != self.data.clients:
            raise ConfigError(
                f"split.counts: got {sum(self.split.counts)} clients, expected data.clients = {self.data.clients}"
            )
        if self.engine.address is not None and self.engine.executor != "ray":
            raise ConfigError(
                f"engine.address: got {self.engine.address!r}, expected none: it goes with engine.executor = 'ray'"
            )
        data = dataclasses.replace(
            self.data,
            partition=self.data.partition
            if self.data.partition != "auto"
            else ("natural" if source.natural else "dirichlet"),
            side=self.data.side or family.side,
        )
        if data.side is not None and source.vocabulary:
            raise ConfigError(f"data.side: got {data.side}, expected none: {self.data.name} holds texts")
        model = dataclasses.replace(
            self.model,
            name=name,
            width=self.model.width or (source.width if family.scaled else 1.0),
            stem=source.stem if self.model.stem == "auto" and family.stem else self.model.stem,
        )
        if model.stem != "auto" and not family.stem:
            raise ConfigError(f"model.stem: got {model.stem!r}, expected none: {name} has no such option")
        split = self.split
        if split.kind == "auto":
            suits = (family.split or "auto") if method.split == "stage" else method.split
            split = dataclasses.replace(split, kind=suits)
        if split.levels == "auto" and split.kind == "hetero":
            split = dataclasses.replace(split, levels=5)
        elif split.levels == "auto" and family.levels:
            split = dataclasses.replace(split, levels=min(family.levels, model.depth or family.levels))
        if method.level == "own" and method.split == "hetero" and split.kind != "hetero":
            raise ConfigError(f"split.kind: got {split.kind!r}, expected 'hetero': {method.name} splits by width")
        aggregate = self.aggregate
        if aggregate.weighting == "auto":
            aggregate = dataclasses.replace(aggregate, weighting=method.server.weighting)
        if aggregate.server_lr == "1/epochs":
            aggregate = dataclasses.replace(aggregate, server_lr=1 / self.local.epochs)
        buffers = method.server.buffers if self.buffers == "auto" else self.buffers
        if method.window != "prefix" and buffers == "per-level":
            raise ConfigError(f"buffers: got 'per-level', expected 'static' or 'average': {method.name} moves a window")
        if isinstance(method.client, Moon) and buffers == "static":
            raise ConfigError(f"buffers: got 'static', expected another: {method.name} evaluates while it trains")
        if isinstance(method.client, Moon) and self.engine.compile:
            raise ConfigError(f"engine.compile: got true, expected false: {method.name} looks into the model")
        if (window := self.record.window) is not None and window[0] > window[1]:
            raise ConfigError(f"record.window: got {list(window)}, expected the first round before the last")
        object.__setattr__(self, "method", method.name)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "split", split)
        object.__setattr__(self, "aggregate", aggregate)
        if method.exits and self.scalefl.distil_after is None:
            scalefl = dataclasses.replace(self.scalefl, distil_after=self.rounds // 4)
            object.__setattr__(self, "scalefl", scalefl)
        object.__setattr__(self, "buffers", buffers)

    @property
    def cohort_size(self) -> int:
        """Clients per round."""
        return int(self.cohort) if self.cohort >= 1 else max(1, round(self.cohort * self.data.clients))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``None`` is written ``"none"``, for TOML has no null."""
        return typing.cast(dict[str, Any], _plain(dataclasses.asdict(self)))

    def to_toml(self) -> str:
        """The resolved config as a TOML document."""
        return tomli_w.dumps(self.to_dict())

    def digest(self) -> str:
        """Identifies everything that can change results: a run may be resumed only under the same digest.

        The number of rounds, that of workers and the place of the data are left out: a run can be prolonged or moved.
        """
        values = {key: value for key, value in self.flat().items() if key not in UNBOUND}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()

    def flat(self) -> dict[str, Any]:
        """All values by dotted key, as ``--set`` names them."""
        tree = self.to_dict()
        tables = {
            f"{table}.{key}": v for table, value in tree.items() if isinstance(value, dict) for key, v in value.items()
        }
        return {key: value for key, value in tree.items() if not isinstance(value, dict)} | tables


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return "none" if value is None else value
