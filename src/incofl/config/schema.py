"""The configuration of a run: a tree of dataclasses that mirrors the TOML file, checked field by field."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le, Lt

from incofl.attacks import Attack
from incofl.client import LocalSettings
from incofl.errors import ConfigError
from incofl.method import BufferPolicy, Weighting
from incofl.options import options
from incofl.split import Kind, Start

Count = Annotated[int, Ge(1)]
Population = Annotated[int, Ge(1), Le(10**8)]  # for each of which the server keeps a few bytes
# Keys that may change when a run is resumed, because they cannot change its results.
UNBOUND = {"rounds", "data.root", "split.names", "record.every", "record.window", "record.trackers"}
UNBOUND |= {"record.tensorboard", "eval.best_path"}
UNBOUND |= {f"engine.{key}" for key in ("executor", "workers", "address", "trace", "client_memory")}


@options("data")
class DataConfig:
    """Which data, and who holds them."""

    name: str = "digits"  # a data set (``incofl list datasets``), or your own ``Data`` as ``package.module:attribute``
    root: str = "data"  # the folder that holds its files; the embedded digits need none
    # ``dirichlet`` (label skew), ``iid``, ``natural`` (clients that the data come with, largest first), ``virtual``
    # (any number of clients that draw ``examples`` examples each from the data set, with a Dirichlet label mix of their
    # own), or what suits the data
    partition: Literal["iid", "dirichlet", "natural", "virtual", "auto"] = "auto"
    alpha: Annotated[float, Gt(0), Le(1e6)] = 0.5  # concentration of the Dirichlet partition; small is very uneven
    # number of clients; left out, those that your own data come with, or 20
    clients: Population | Literal["auto"] = "auto"
    limit: Count | None = None  # use only this number of training examples, drawn by the seed
    examples: Annotated[int, Ge(1), Le(10**7)] = 100  # number of examples of each client of a virtual partition
    # of texts of words, a file with a word in each line (``incofl data words``), or the folder or name on the Hub of a
    # tokenizer of Hugging Face; left out, that in the folder of an ``hf:`` model, or the most frequent words
    tokenizer: str | None = None
    length: Annotated[int, Ge(2), Le(65536)] | None = None  # tokens of a text; left out, what suits the data
    # what is learned of texts of words: their ``label``, or at every position the ``next`` token, to pretrain a model
    target: Literal["label", "next"] = "label"
    side: Annotated[int, Ge(4), Le(1024)] | None = None  # side of the model's images in pixels; left out, what suits it


@options("model")
class ModelConfig:
    """The server model, named by the largest member of its family."""

    # one of ``incofl list models``, your own ``package.module:attribute``, a class of Hugging Face transformers such as
    # ``hf:AutoModelForSequenceClassification``, or what suits the data
    name: str = "auto"
    width: Annotated[float, Gt(0), Le(4)] | None = None  # multiplier of all channels; left out, what suits the data
    # stem of a ResNet: ``imagenet`` (the paper's: 7x7, pooling), ``small`` (3x3), or what suits the data
    stem: Literal["imagenet", "small", "auto"] = "auto"
    depth: Count | None = None  # blocks of a ViT or text transformer, layers of an LSTM; left out, as its name says
    dim: Count | None = None  # width of its residual stream or hidden state; left out, as its name says
    heads: Count | None = None  # heads of its attention; left out, as its name says
    patch: Count | None = None  # side of a ViT's patches in pixels; left out, 16, or an eighth of that of small images
    # initial weights: a safetensors file, or a name on the Hugging Face Hub; for ``hf:`` a folder, or a name
    pretrained: str | None = None
    # for your own model, the path of the list of its blocks, such as ``encoder.layers``, or several; left out, found
    blocks: str | tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # a table of arguments for your own model's factory


@options("split")
class SplitConfig:
    """The sizes of client models."""

    # ``stage`` (first blocks of each stage), ``layer`` (first blocks of all), ``hetero`` (narrower layers), ``rank``
    # (fewer ranks of adapters, for methods of LoRA), or what suits method and model
    kind: Kind | Literal["auto"] = "auto"
    # the number of sizes, or one entry per size from small to large: blocks per stage such as ``[1, 1, 2, 2]`` (stage),
    # a number of blocks (layer), a share of the channels (hetero), a rank (rank). Left out, five, three ranks, or what
    # the model has
    levels: Count | tuple[int | float | tuple[int, ...], ...] | Literal["auto"] = "auto"
    # with hetero or rank splitting: ``full``, ``scaled`` (the same share of blocks), or blocks per stage per level
    depth: Literal["full", "scaled"] | tuple[int | tuple[int, ...], ...] = "full"
    # how a share of the channels is rounded to a whole number of them, which is 1 at least
    rounding: Literal["up", "down"] = "up"
    # number of clients of each level; left out, groups are equal. The first clients are the smallest
    counts: tuple[Annotated[int, Ge(0)], ...] | None = None
    # what the devices of each level are called in tables and pages; left out, ``level 0`` and so on
    names: tuple[str, ...] | None = None
    # ``random``, or ``identity``: what not every level holds begins without effect, so that all levels start as the
    # function of the smallest; ``identity-if-possible``: at random where the model does not allow that, and not of
    # values that may be trained (``model.pretrained``, a module that is given as it is); ``auto``: as the method says
    start: Start | Literal["auto"] = "auto"
    # when larger levels open; until then their clients train the largest open one. None: at the start; ``plateau``: one
    # more when the loss stops falling; or one entry for each level but the smallest, a number of rounds or a share of
    # all; ``auto``: as the method says
    grow: Literal["plateau", "auto"] | tuple[Annotated[float, Ge(0)], ...] | None = "auto"


HEADINGS = {"", "devices", "run", "rounds", "last", "best", "bytes", "time", "rejected", "status"}  # of other columns


def called(names: object, level: int) -> str:
    """What the devices of a level are called by ``split.names``, which may be of a damaged file, or none."""
    return str(names[level]) if isinstance(names, list | tuple) and level < len(names) else f"level {level}"


@options("task")
class TaskConfig:
    """What the model is trained for."""

    # ``classification``, ``multilabel``, ``regression``, ``next-token``, ``segmentation``, or your own ``Task`` as
    # ``package.module:attribute``
    name: str = "classification"


@options("aggregate")
class AggregateConfig:
    """How the server averages."""

    # ``uniform`` over those that hold a position (the paper's code), by ``samples``, or the method's own
    weighting: Weighting | Literal["auto"] = "auto"
    precision: Literal["float32", "float64"] = "float32"  # dtype of the running sums


@options("validation")
class ValidationConfig:
    """What the server accepts of clients, in addition to exact names, shapes and types, and finite values."""

    # an update whose norm is out of scale is made shorter (``clip``), or its upload refused (``reject``); ``off``:
    # neither. Batch-norm statistics out of scale are always refused, unless it is ``off``
    norm: Literal["clip", "reject", "off"] = "clip"
    # out of scale is more than this many times the running median of the client's level (of all levels, by their
    # size, if the fleet has one or two clients of that level), and in proportion more for a client with more steps, up
    # to this many times again. One client of a cohort of eight cannot move the model by much more than an honest round
    # does, or ten of them if it lies about its steps
    multiple: Annotated[float, Gt(1)] = 10.0
    least: Count = 1  # valid uploads that a round needs; with fewer, the model stays as it was


@options("engine")
class EngineConfig:
    """Where turns are computed."""

    # ``processes`` of this machine, ``ray`` (docs/cluster.md; needs the extra ``ray``), or ``auto``: processes, and
    # this process alone where ``workers`` is 1
    executor: Literal["auto", "processes", "ray"] = "auto"
    # number of processes that train clients, each on one core; 1: in this process; ``auto``: what is fastest, or the
    # value of the environment variable ``INCOFL_WORKERS``; on a cluster, one per core
    workers: Count | Literal["auto"] = "auto"
    # a running Ray cluster: ``auto``, ``HOST:6379`` or ``ray://HOST:10001``; left out, Ray starts here
    address: str | None = None
    device: str = "cpu"  # torch device of the clients' training; devices other than ``cpu`` are untested
    # of forward passes and losses, in training and evaluation: ``bf16`` is faster on processors with units for it, and
    # refused on others; weights, updates, their sums and optimisers stay float32
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False  # ``torch.compile``: a minute per level and process, which hardly pays on a CPU
    # train clients of a level side by side, as one batched computation, where method and model can: much faster for
    # small models and few examples, equal to turns up to rounding; ``auto``: where that is faster (docs/speed.md)
    vectorise: bool | Literal["auto"] = False
    vectorise_clients: Annotated[int, Ge(2)] = 64  # how many at a time; memory grows with it
    trace: bool = False  # write a timeline of the run, ``trace.json``, for Perfetto or chrome://tracing
    client_memory: Count = 2**30  # bytes of client memory that are kept in RAM; the rest is on disk

    def __post_init__(self) -> None:
        if self.address is not None and self.executor != "ray":
            raise ConfigError(f"engine.address: got {self.address!r}, expected none without engine.executor = 'ray'")


@options("eval")
class EvalConfig:
    """When the server model is evaluated."""

    every: Count = 1  # number of rounds between two evaluations; the last round is always evaluated
    limit: Count | None = None  # use only this number of test examples, drawn by the seed
    measured: Count = 5000  # number of training images, drawn by the seed, to measure static batch-norm statistics
    # Record what devices get that use the best of the models they can hold, their own level's or a smaller one's; it is
    # chosen on one half of the test set and counted on the other, and the other way round. ``auto``: as the method says
    best_path: bool | Literal["auto"] = "auto"


@options("record")
class RecordConfig:
    """What a run keeps for later analysis (``incofl analyze``), in addition to its last state."""

    every: Annotated[int, Ge(0)] = 0  # keep the state at the start and after every this many rounds; 0: only the last
    window: tuple[Count, Count] | None = None  # keep all states from one round to another, such as ``[40, 50]``
    # programs that get the numbers of each round, such as ``["tensorboard"]``; each needs the extra of its name
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    tensorboard: bool = False  # the same as ``trackers = ["tensorboard"]``

    def __post_init__(self) -> None:
        if self.window is not None and self.window[0] > self.window[1]:
            raise ConfigError(f"record.window: got {list(self.window)}, expected the first round before the last")

    def keeps(self, round: int) -> bool:
        """Whether the state after a round is kept."""
        in_window = self.window is not None and self.window[0] <= round <= self.window[1]
        return in_window or (self.every > 0 and round % self.every == 0)


@options("")
class Config:
    """A run, completely."""

    seed: Annotated[int, Ge(0)] = 0  # seed of all random streams: weights, partition, cohorts, batches, augmentation
    rounds: Count = 50  # number of rounds
    method: str = "fedfloor"  # one of ``incofl list methods``, or your own ``Method`` as ``package.module:attribute``
    cohort: Count | Annotated[float, Gt(0), Lt(1)] = 0.4  # clients per round: a count, or a ratio below 1
    # batch-norm statistics: ``per-level`` (each size has its own), ``average`` over all (the paper), ``by-width``
    # (sizes of one width share theirs), ``static`` (measured for each size before an evaluation, on training images),
    # or the method's own
    buffers: BufferPolicy | Literal["auto"] = "auto"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    local: LocalSettings = field(default_factory=LocalSettings)
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    attack: Attack = field(default_factory=Attack)
    methods: dict[str, Any] = field(default_factory=dict)  # options by section, in a file tables such as ``[inco]``
    objects: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    unused: tuple[str, ...] = field(default=(), compare=False, repr=False)  # sections that the method does not have

    @property
    def num_clients(self) -> int:
        assert self.data.clients != "auto"  # resolved
        return self.data.clients

    @property
    def cohort_size(self) -> int:
        return int(self.cohort) if self.cohort >= 1 else max(1, round(self.cohort * self.num_clients))

    def to_dict(self) -> dict[str, Any]:
        """Plain values as in a TOML file, where ``None`` is ``"none"``."""
        text = json.dumps({key: getattr(self, key) for key in KEYS} | self.methods, default=vars)
        tree: Any = json.loads(text, object_hook=lambda t: {k: "none" if v is None else v for k, v in t.items()})
        return dict(tree)

    def to_toml(self) -> str:
        """The resolved config as a TOML document."""
        return tomli_w.dumps(self.to_dict())

    def digest(self) -> str:
        """Identifies everything that can change results: a run may be resumed only under the same digest."""
        off = "attack." if self.attack.kind is None else "-"  # what attackers would do, if there were any
        values = {k: v for k, v in self.flat().items() if k not in UNBOUND and not k.startswith(off)}
        values["eval.best_path"] = False  # as in the digests of runs of which it was bound
        if "method" in self.objects:  # whose parts may have parameters that no section of a config has
            values["method"] = re.sub(r" at 0x[0-9a-f]+", "", repr(self.objects["method"]))
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()

    def flat(self) -> dict[str, Any]:
        """All values by dotted key, as ``--set`` names them."""
        return flat(self.to_dict())


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a TOML file by dotted key."""
    tables = {key: value if isinstance(value, dict) else {"": value} for key, value in tree.items()}
    return {f"{key}.{name}".strip("."): value for key, table in tables.items() for name, value in table.items()}


# The keys of a file, and which of them are tables, in addition to those of methods.
KEYS = tuple(f.name for f in fields(Config) if f.name not in ("methods", "objects", "unused"))
SECTIONS = {key: value for key, value in vars(Config()).items() if is_dataclass(value)}
