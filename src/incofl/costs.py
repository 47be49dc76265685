"""What a sub-model costs, R(M), and the largest one that each device of a fleet can afford: R(M_i) <= R_i."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from incofl.client import LocalSettings
from incofl.config import read_toml
from incofl.errors import ConfigError, nearest
from incofl.method import Method
from incofl.models import Model
from incofl.optimizers import REGISTER
from incofl.server import Population, Server
from incofl.split import RANK, Slice, Splitter, kept, submodel
from incofl.tensors import Inputs, call, map_inputs, only

PLAIN = Method("plain")
# Parameters times elements of a batch up to which a forward pass on zeros takes a fraction of a second: less than the
# imports of the meta device's kernels.
QUICK = 2**34
# The limits of a device, each with the units in which it can be written, and the decimal prefixes of units.
_UNITS = {"memory": ("B",), "compute": ("MAC", "MACs"), "bandwidth": ("B",)}
_SPEED = {"speed": ("MAC/s", "MAC", "MACs")}  # which limits nothing
_SCALES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


@dataclass(frozen=True)
class Cost:
    """The resources that one level's sub-model needs."""

    level: int  # 0 is the smallest
    blocks: tuple[int, ...]  # kept in each stage
    width: float  # share of the server model's channels that is kept
    parameters: int  # number of trained scalars
    macs: int  # multiply-accumulates of one example, forward; a training step costs about three times as much
    bytes_down: int  # that a client receives per round: parameters, buffers, and what the method adds
    bytes_up: int  # that it sends
    memory: int  # estimated peak of training in bytes, without the framework itself
    rank: int | None = None  # of low-rank adapters, if that is what levels differ in

    def cells(self, clients: int, number: Callable[[int], str] = lambda n: human(n)) -> dict[str, str]:
        """What the level is and costs, and how many clients train it, by the headings of tables."""
        share = {"width": f"{self.width:g}"} if self.rank is None else {"rank": str(self.rank)}
        sizes = {"down": self.bytes_down, "up": self.bytes_up, "memory": self.memory}
        return {
            **{"level": str(self.level), "blocks": " ".join(map(str, self.blocks))},
            **share,
            **{"params": number(self.parameters), "MACs": number(self.macs)},
            **{name: human(size, "B") for name, size in sizes.items()},
            "clients": str(clients),
        }


def forward_work(model: Model, splitter: Splitter) -> list[int]:
    """The multiply-accumulates of one example in a forward pass of each level, smallest first."""
    slices = [splitter.slice(model.layout, level, 0, client=0) for level in range(len(splitter.depths))]
    return [from_shapes(count_macs, model, slice_, 1) for slice_ in slices]


def work(forward: Sequence[int], method: Method = PLAIN) -> list[int]:
    """The same in all paths that a method trains in each level."""
    found = []
    for level in range(len(forward)):
        passes = method.client.passes(level)  # paths of smaller levels may be trained, too, one at a time
        macs = round(sum(times * one for times, one in zip(passes, forward[: level + 1], strict=True)))
        anchored = method.anchor.on and level
        found.append(macs + (forward[0] // method.anchor.every if anchored else 0))
    return found


def costs(model: Model, splitter: Splitter, settings: LocalSettings, method: Method = PLAIN) -> list[Cost]:
    """The cost of each level, smallest first."""
    found, activations, ranks = [], list[int](), model.layout.named_axes.get(RANK)
    macs = work(forward_work(model, splitter), method)
    # Weights, the received copy that the update is measured against, gradients; Adam keeps two moments, SGD one.
    copies = 3 + (int(settings.momentum > 0) if settings.optimizer == "sgd" else 2)
    for level, (depth, width) in enumerate(zip(splitter.depths, splitter.shares, strict=True)):
        slice_ = splitter.slice(model.layout, level, 0, client=0)
        sizes = [math.prod(slice_.shapes[name]) for name in model.layout.parameters & slice_.shapes.keys()]
        parameters, padded = sum(sizes), sum(size for size in sizes if size % REGISTER)  # these have two gradients
        frozen = sum(math.prod(slice_.shapes[name]) for name in slice_.frozen | slice_.given)
        transfer, given = (slice_.num_bytes(part) for part in (model.initial, only(model.initial, slice_.given)))
        population = {0: (splitter.slice(model.layout, 0, 0, client=0), 1), level: (slice_, 1)}
        received, uploaded, held = method_bytes(model, population, level, method)
        activations.append(from_shapes(activation_bytes, model, slice_, settings.batch_size))
        passes = method.client.passes(level)
        below = [activations[level - 1]] if level and passes[-1] == 1 and any(passes[:-1]) else []
        below += [activations[0]] if level and method.anchor.on else []  # a path of a smaller level is trained, too
        memory = 4 * (copies * parameters + padded + frozen) + sum([activations[level], *below]) + held
        down, up = transfer + received, transfer - given + uploaded
        rank = None if ranks is None else kept(ranks.size, width)
        found.append(Cost(level, depth, width, parameters, macs[level], down, up, memory, rank))
    return found


def from_shapes(count: Callable[[nn.Module, Inputs], int], model: Model, slice_: Slice, batch_size: int) -> int:
    """What ``count`` finds in a forward pass of a sub-model, and follows from shapes alone.

    It is found on zeros where that is quick, else on the meta device, whose kernels import a compiler, if that can be.
    """
    size = sum(math.prod(shape) for shape in slice_.shapes.values())
    if size * sum(x.numel() for x in tree_leaves(model.example(batch_size))) > QUICK:
        with contextlib.suppress(Exception):  # for example, forward looks at values
            return count_on("meta", count, model, slice_, batch_size)
    return count_on("cpu", count, model, slice_, batch_size)


def count_on(
    device: str, count: Callable[[nn.Module, Inputs], int], model: Model, slice_: Slice, batch_size: int
) -> int:
    """The same, found on a device: the meta device, or the CPU with the initial weights."""
    module = submodel(model.template, model.layout, slice_)
    if device == "cpu":
        module.load_state_dict(slice_.take(model.initial))
    unroll(module.to(device))
    batch = map_inputs(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), model.example(batch_size))
    # The device is for tensors that forward makes; fused attention would not be counted.
    with torch.random.fork_rng(devices=[]), torch.device(device), sdpa_kernel(SDPBackend.MATH):
        return count(module, batch)


def method_bytes(model: Model, population: Population, level: int, method: Method) -> tuple[int, int, int]:
    """The bytes that a client receives, uploads and holds in addition to its model, computed from shapes alone."""
    layout, client, slice_ = model.layout, method.client, population[level][0]
    state = {name: value.to("meta") for name, value in model.initial.items()}
    with torch.device("meta"):
        server = method.server.start(Server(layout, state, population=population))
        sent = method.extra_for_client(server, level)
    kept = [client.extra(layout), *client.held(layout)]
    uploaded, *held = (slice_.num_bytes({name: state[name] for name in names}) for names in kept)
    smallest = method.smallest_statistics(layout, population, level)
    return slice_.num_bytes(sent), uploaded + (smallest.num_bytes(state) if smallest else 0), sum(held)


def count_macs(module: nn.Module, example: Inputs) -> int:
    """Counts the multiply-accumulates of convolutions and matrix products, attention included, in one forward pass."""
    counter = Counter()  # type: ignore[no-untyped-call]
    module.eval().training = True  # its layers as in evaluation, but all exits, as in training
    with torch.no_grad(), counter:
        call(module, example)
    return counter.flops // 2  # a multiplication and an addition each


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts operations by torch's own formulas, as its ``FlopCounterMode`` does, without the second that it takes."""

    flops: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch.compile is imported, which is not used here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=made)
        return made


def unroll(module: nn.Module) -> None:
    """Makes the LSTMs of a module compute all positions at once, for when only shapes matter."""
    for layer in module.modules():
        if isinstance(layer, nn.LSTM) and not layer.bidirectional and not layer.proj_size:
            layer.forward = functools.partial(_all_positions, layer)  # type: ignore[method-assign, assignment]  # of this object


def _all_positions(layer: nn.LSTM, x: Tensor, start: object = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    time = x.dim() - 2 if layer.batch_first else 0
    for weights in layer.all_weights:
        inputs = x.flatten(0, -2)
        before = inputs.new_zeros(len(inputs), layer.hidden_size), inputs.new_zeros(len(inputs), layer.hidden_size)
        x = torch.lstm_cell(inputs, before, *weights)[0].view(*x.shape[:-1], -1)
    last = torch.stack([x.select(time, -1)] * layer.num_layers)  # states and cells have the same shape
    return x, (last, last)


def activation_bytes(module: nn.Module, batch: Inputs) -> int:
    """Counts the bytes that autograd keeps for the backward pass of one batch, without the parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # as long as a tensor is held, the address of its storage is not used again

    def pack(tensor: Tensor) -> None:  # and keeps nothing: a tensor would keep the graph, and the graph the tensor
        if (key := tensor.untyped_storage()._cdata) not in own:
            kept[key] = tensor.detach()

    module.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
        call(module, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@dataclass(frozen=True)
class DeviceClass:
    """A kind of client device with its limits R_i; ``None`` is no limit."""

    name: str
    count: int  # number of clients
    memory: int | None = None  # bytes for training
    compute: int | None = None  # multiply-accumulates per example, forward
    bandwidth: int | None = None  # bytes per round, down and up together
    speed: int | None = None  # multiply-accumulates per second; ``None``: as this machine

    def exceeded(self, cost: Cost) -> list[str]:
        """The limits that a sub-model exceeds, in words; none if R(M) <= R_i."""
        needs = {"memory": cost.memory, "compute": cost.macs, "bandwidth": cost.bytes_down + cost.bytes_up}
        return [
            f"{resource} {human(need, _UNITS[resource][0])}, has {human(limit, _UNITS[resource][0])}"
            for resource, need in needs.items()
            if (limit := getattr(self, resource)) is not None and need > limit
        ]


def assign(devices: list[DeviceClass], levels: list[Cost]) -> list[int]:
    """For each device class, the level of the largest sub-model within all its limits."""
    chosen = []
    for device in devices:
        fitting = [cost for cost in levels if not device.exceeded(cost)]
        if not fitting:
            why = f"no level fits; the smallest (level 0) needs {'; '.join(device.exceeded(levels[0]))}"
            hint = "Add a smaller level (split.levels) or raise the limit"
            raise ConfigError(f"device class {device.name!r}: {why}. {hint}")
        chosen.append(max(fitting, key=lambda cost: (cost.parameters, cost.level)).level)
    return chosen


def load_devices(path: Path) -> list[DeviceClass]:
    """Reads the device classes of a TOML file."""
    tree = read_toml(path)
    entries: Any = tree.get("device")
    if isinstance(entries, dict):
        raise ConfigError(f"{path}: got a table [device], expected an array of tables: write [[device]]")
    tables = isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)
    if not tables or len(tree) > 1:
        raise ConfigError(f"{path}: expected [[device]] tables and nothing else, got {sorted(tree) or 'an empty file'}")
    devices = [_device(entry, f"{path}: device {number}") for number, entry in enumerate(entries, start=1)]
    names = [device.name for device in devices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: two classes are called {twice!r}, expected a name of its own for each")
    return devices


def _device(entry: Mapping[str, Any], where: str) -> DeviceClass:
    known = "name", "count", *_UNITS, *_SPEED
    if unknown := [key for key in entry if key not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}{nearest(unknown[0], known)}")
    name, count = entry.get("name"), entry.get("count")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name: got {name!r}, expected a string")
    if type(count) is not int or count < 1:  # True is an int, too
        raise ConfigError(f"{where} ({name}): count: got {count!r}, expected a whole number >= 1")
    return DeviceClass(name, count, **read_limits(entry, f"{where} ({name})", _UNITS | _SPEED))


def read_limits(entry: Mapping[str, Any], where: str, units: Mapping[str, tuple[str, ...]] = _UNITS) -> dict[str, int]:
    """The limits among some values, as numbers of bytes and multiply-accumulates."""
    return {key: parse_quantity(entry[key], f"{where}: {key}", each) for key, each in units.items() if key in entry}


def human(value: float, unit: str = "") -> str:
    """Writes a number with a decimal prefix: 4910922 -> ``4.91 M``."""
    prefix, scale = next((entry for entry in _SCALES.items() if abs(value) >= entry[1]), ("", 1.0))
    return f"{value / scale:{'.3g' if prefix else 'g'}} {prefix}{unit}".strip()


def parse_quantity(value: object, what: str, units: tuple[str, ...]) -> int:
    """Reads a number with a unit and perhaps a decimal prefix: ``"200 MB"``, ``"20 MMAC"``."""
    pattern = rf"(\d+\.?\d*)\s*([kmgt]?)({'|'.join(units)})?"
    parts = re.fullmatch(pattern, str(value).strip(), re.IGNORECASE)
    scales = {prefix.lower(): scale for prefix, scale in _SCALES.items()}
    number = float(parts[1]) * scales[parts[2].lower()] if parts else 0.0
    if parts is None or parts[3] is None or not 0 < number < math.inf:
        example = human(number, units[0]) if number >= 1e4 else f"{number or 10:g} M{units[0]}"
        raise ConfigError(f'{what}: got {value!r}, expected a number > 0 with its unit: write "{example}"')
    return int(number)
