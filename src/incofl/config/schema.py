"""The configuration of a run: a tree of dataclasses that mirrors the TOML file, checked field by field."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w
from annotated_types import Ge, Gt, Le, Lt

from incofl.client import LocalSettings
from incofl.errors import ConfigError
from incofl.method import BufferPolicy, Weighting
from incofl.options import options
from incofl.split import Kind, Start

Count = Annotated[int, Ge(1)]
# Keys that may change when a run is resumed, because they cannot change its results.
UNBOUND = {"rounds", "data.root", "record.every", "record.window", "record.tensorboard"}
UNBOUND |= {f"engine.{key}" for key in ("executor", "workers", "address", "trace", "client_memory")}


@options("data")
class DataConfig:
    """Which data, and who holds them.

    Attributes:
        name: the data set (``incofl list datasets``), or your own ``Data`` as ``package.module:attribute``.
        root: the folder that holds its files; the embedded digits need none.
        partition: ``dirichlet`` (label skew), ``iid``, ``natural`` (clients that the data come with, largest first),
            ``virtual`` (any number of clients that draw ``examples`` examples each from the data set, with a Dirichlet
            label mix of their own), or what suits the data.
        alpha: concentration of the Dirichlet partition; small is very uneven, large is even.
        clients: number of clients; left out, those that your own data come with, or 20.
        limit: use only this number of training examples, drawn by the seed.
        examples: number of examples of each client of a virtual partition.
        side: side in pixels at which images are shown to the model; left out, what suits the model.
    """

    name: str = "digits"
    root: str = "data"
    partition: Literal["iid", "dirichlet", "natural", "virtual", "auto"] = "auto"
    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.5
    clients: Count | Literal["auto"] = "auto"
    limit: Count | None = None
    examples: Count = 100
    side: Annotated[int, Ge(4), Le(1024)] | None = None


@options("model")
class ModelConfig:
    """The server model, named by the largest member of its family.

    Attributes:
        name: the model (``incofl list models``), your own as ``package.module:attribute``, or what suits the data.
        width: multiplier of all channel numbers of the server model; left out, what suits the data.
        stem: stem of a ResNet: ``imagenet`` (the paper's: 7x7, pooling), ``small`` (3x3), or what suits the data.
        depth: blocks of a ViT or text transformer, layers of an LSTM; left out, as its name says.
        dim: width of its residual stream or hidden state; left out, as its name says.
        heads: heads of its attention; left out, as its name says.
        patch: side of a ViT's patches in pixels; left out, 16, or an eighth of the side of small images.
        pretrained: initial weights: a safetensors file, or a name on the Hugging Face Hub.
        options: a table of arguments for your own model's factory.
    """

    name: str = "auto"
    width: Annotated[float, Gt(0), Le(4)] | None = None
    stem: Literal["imagenet", "small", "auto"] = "auto"
    depth: Count | None = None
    dim: Count | None = None
    heads: Count | None = None
    patch: Count | None = None
    pretrained: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@options("split")
class SplitConfig:
    """The sizes of client models.

    Attributes:
        kind: ``stage`` (first blocks of each stage), ``layer`` (first blocks of all), ``hetero`` (narrower layers), or
            what suits method and model.
        levels: the number of sizes, or one entry per size from small to large: blocks per stage such as
            ``[1, 1, 2, 2]`` (stage), a number of blocks (layer), a share of the channels (hetero). Left out, five, or
            what the model has.
        depth: with hetero splitting: ``full``, ``scaled`` (the same share of blocks), or blocks per stage per level.
        counts: number of clients of each level; left out, groups are equal. The first clients are the smallest.
        start: ``random``, or ``identity``: what not every level holds begins without effect, so that all levels start
            as the function of the smallest; ``auto``: as the method says.
        grow: when larger levels open; until then their clients train the largest open one. None: at the start;
            ``plateau``: one more when the loss stops falling; or one entry for each level but the smallest, a number of
            rounds or a share of all; ``auto``: as the method says.
    """

    kind: Kind | Literal["auto"] = "auto"
    levels: Count | tuple[int | float | tuple[int, ...], ...] | Literal["auto"] = "auto"
    depth: Literal["full", "scaled"] | tuple[int | tuple[int, ...], ...] = "full"
    counts: tuple[Annotated[int, Ge(0)], ...] | None = None
    start: Start | Literal["auto"] = "auto"
    grow: Literal["plateau", "auto"] | tuple[Annotated[float, Ge(0)], ...] | None = "auto"


@options("task")
class TaskConfig:
    """What the model is trained for.

    Attributes:
        name: ``classification``, ``multilabel``, ``regression``, ``next-token``, ``segmentation``, or your own ``Task``
            as ``package.module:attribute``.
    """

    name: str = "classification"


@options("aggregate")
class AggregateConfig:
    """How the server averages.

    Attributes:
        weighting: ``uniform`` over those that hold a position (the paper's code), by ``samples``, or the method's own.
        precision: dtype of the running sums.
    """

    weighting: Weighting | Literal["auto"] = "auto"
    precision: Literal["float32", "float64"] = "float32"


@options("engine")
class EngineConfig:
    """Where turns are computed.

    Attributes:
        executor: ``processes`` of this machine, ``ray`` (docs/cluster.md; needs the extra ``ray``), or ``auto``:
            processes, and this process alone where ``workers`` is 1.
        workers: number of processes that train clients, each on one core; 1: in this process; ``auto``: what is
            fastest, or the value of the environment variable ``INCOFL_WORKERS``; on a cluster, one per core.
        address: a running Ray cluster: ``auto``, ``HOST:6379`` or ``ray://HOST:10001``; left out, Ray starts here.
        device: torch device of the clients' training; devices other than ``cpu`` are untested.
        compile: train with ``torch.compile``: faster steps, but about a minute for each level at the start of every
            process; needs a C++ compiler.
        trace: write a timeline of the run, ``trace.json``, for Perfetto or chrome://tracing.
        client_memory: bytes of client memory that are kept in RAM; the rest is on disk.
    """

    executor: Literal["auto", "processes", "ray"] = "auto"
    workers: Count | Literal["auto"] = "auto"
    address: str | None = None
    device: str = "cpu"
    compile: bool = False
    trace: bool = False
    client_memory: Count = 2**30

    def __post_init__(self) -> None:
        if self.address is not None and self.executor != "ray":
            raise ConfigError(f"engine.address: got {self.address!r}, expected none without engine.executor = 'ray'")


@options("eval")
class EvalConfig:
    """When the server model is evaluated.

    Attributes:
        every: number of rounds between two evaluations; the last round is always evaluated.
        limit: use only this number of test examples, drawn by the seed.
        measured: number of training images, drawn by the seed, on which static batch-norm statistics are measured.
    """

    every: Count = 1
    limit: Count | None = None
    measured: Count = 5000


@options("record")
class RecordConfig:
    """What a run keeps for later analysis (``incofl analyze``), in addition to its last state.

    Attributes:
        every: keep the server's state before the first round and after every this many rounds; 0: only the last.
        window: the first and the last of some rounds after each of which the state is kept too, such as ``[40, 50]``.
        tensorboard: write TensorBoard event files into the run folder; needs the extra ``tensorboard``.
    """

    every: Annotated[int, Ge(0)] = 0
    window: tuple[Count, Count] | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window[0] > self.window[1]:
            raise ConfigError(f"record.window: got {list(self.window)}, expected the first round before the last")

    def keeps(self, round: int) -> bool:
        """Whether the state after a round is kept."""
        in_window = self.window is not None and self.window[0] <= round <= self.window[1]
        return in_window or (self.every > 0 and round % self.every == 0)


@options("")
class Config:
    """A run, completely.

    Attributes:
        seed: seed of every random stream: initial weights, partition, cohorts, batches, augmentation.
        rounds: number of rounds.
        method: the method (``incofl list methods``), or your own ``Method`` as ``package.module:attribute``.
        cohort: clients per round: a count, or a ratio below 1.
        buffers: batch-norm statistics: ``per-level`` (each size has its own), ``average`` over all (the paper),
            ``static`` (measured for each size before an evaluation, on training images), or the method's own.
        methods: the options of methods, by section; in a file each section is a table of its own such as ``[inco]``.
    """

    seed: Annotated[int, Ge(0)] = 0
    rounds: Count = 50
    method: str = "incoavg"
    cohort: Count | Annotated[float, Gt(0), Lt(1)] = 0.4
    buffers: BufferPolicy | Literal["auto"] = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    local: LocalSettings = field(default_factory=LocalSettings)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    methods: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_clients(self) -> int:
        assert self.data.clients != "auto"  # resolved
        return self.data.clients

    @property
    def cohort_size(self) -> int:
        return int(self.cohort) if self.cohort >= 1 else max(1, round(self.cohort * self.num_clients))

    def to_dict(self) -> dict[str, Any]:
        """Plain values as in a TOML file, where ``None`` is ``"none"``."""
        return {key: _plain(value) for key, value in ({key: getattr(self, key) for key in KEYS} | self.methods).items()}

    def to_toml(self) -> str:
        """The resolved config as a TOML document."""
        return tomli_w.dumps(self.to_dict())

    def digest(self) -> str:
        """Identifies everything that can change results: a run may be resumed only under the same digest."""
        values = {key: value for key, value in self.flat().items() if key not in UNBOUND}
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()

    def flat(self) -> dict[str, Any]:
        """All values by dotted key, as ``--set`` names them."""
        flat: dict[str, Any] = {}
        for key, value in self.to_dict().items():
            flat |= {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
        return flat


# The keys of a file, and which of them are tables, in addition to those of methods.
KEYS = tuple(f.name for f in fields(Config) if f.name not in ("methods", "objects"))
SECTIONS = {key: hint for key, hint in get_type_hints(Config).items() if is_dataclass(hint)}


def _plain(value: Any) -> Any:
    value = vars(value) if is_dataclass(value) else value
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return "none" if value is None else value
