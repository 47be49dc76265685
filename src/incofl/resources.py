"""What a sub-model costs, R(M), and the largest one that fits a device: R(M_i) <= R_i."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from incofl.client import LocalSettings
from incofl.errors import ConfigError
from incofl.inputs import Inputs, call
from incofl.method import Method
from incofl.models import Model
from incofl.server import Server
from incofl.split import Slice, Splitter, submodel


@dataclass(frozen=True)
class Cost:
    """The resources of one level's sub-model.

    Attributes:
        level: 0 is the smallest.
        blocks: blocks kept per stage.
        width: channels kept, as a share of the server model's.
        parameters: trained scalars.
        macs: multiply-accumulate operations of convolutions and matrix products, forward, one example. A training
            step costs about three times that.
        bytes_down: what the client receives in a round: parameters, buffers, and what the method sends besides.
        bytes_up: what it sends.
        memory: estimate of what training needs at its peak: weights, received weights, gradients, optimiser state,
            what the method holds besides (``ClientRule.held``), and the activations kept for the backward pass of one
            batch. Without the framework itself.
    """

    level: int
    blocks: tuple[int, ...]
    width: float
    parameters: int
    macs: int
    bytes_down: int
    bytes_up: int
    memory: int


PLAIN = Method("plain", "sends and remembers nothing besides the model")


def costs(model: Model, splitter: Splitter, settings: LocalSettings, method: Method = PLAIN) -> list[Cost]:
    """The cost of each level, smallest first."""
    ratios = getattr(splitter, "ratios", None) or (1.0,) * len(splitter.depths)
    found = []
    for level, (depth, width) in enumerate(zip(splitter.depths, ratios, strict=True)):
        piece = splitter.slice(model.layout, level, 0)
        module = submodel(model.template, model.layout, piece).to("meta")
        unroll(module)
        parameters = sum(math.prod(piece.shapes[name]) for name in model.layout.parameters & piece.shapes.keys())
        transfer, besides = piece.num_bytes(model.initial), _besides(model, piece, level, method)
        # Weights, the received copy that the update is measured against, gradients; Adam keeps two moments, SGD one.
        copies = 3 + (2 if settings.optimizer == "adam" else int(settings.momentum > 0))
        activations = activation_bytes(module, model.example(settings.batch_size))
        cost = Cost(
            level=level,
            blocks=depth,
            width=width,
            parameters=parameters,
            macs=count_macs(module, model.example(1)),
            bytes_down=transfer + besides.received,
            bytes_up=transfer + besides.uploaded,
            memory=copies * 4 * parameters + activations + besides.held,
        )
        found.append(cost)
    return found


@dataclass(frozen=True)
class Besides:
    """Bytes of what a method has a client of one level receive, upload and hold besides its model."""

    received: int
    uploaded: int
    held: int


def _besides(model: Model, piece: Slice, level: int, method: Method) -> Besides:
    """As the two halves of the method declare it; no values are needed to know."""
    layout, client = model.layout, method.client
    state = {name: value.to("meta") for name, value in model.initial.items()}
    with torch.device("meta"):
        server = method.server.start(Server(layout, state, population={level: (piece, 1)}))
        sent = method.server.sent(server, level)
    uploaded, *held = (
        piece.num_bytes({name: state[name] for name in names}) for names in (client.extra(layout), *client.held(layout))
    )
    return Besides(piece.num_bytes(sent), uploaded, sum(held))


def count_macs(module: nn.Module, example: Inputs) -> int:
    """Multiply-accumulates of convolutions and matrix products, those of attention too, in one forward pass."""
    module.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(module, example)
    return int(counter.get_total_flops()) // 2  # a multiplication and an addition each


def unroll(module: nn.Module) -> None:
    """Lets the LSTMs of a module on the meta device compute all positions at once.

    Only shapes count there: the hidden states of before can be any tensor, and hundreds of small steps become one.
    """
    for layer in module.modules():
        if isinstance(layer, nn.LSTM) and not layer.bidirectional and not layer.proj_size:
            layer.forward = functools.partial(_all_positions, layer)  # type: ignore[method-assign, assignment]


def _all_positions(layer: nn.LSTM, x: Tensor, start: object = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    time = x.dim() - 2 if layer.batch_first else 0
    states, cells = [], []
    for number in range(layer.num_layers):
        w_x, w_h, *biases = layer.all_weights[number]
        before = x.new_empty(*x.shape[:-1], layer.hidden_size)
        gates = functional.linear(x, w_x, *biases[:1]) + functional.linear(before, w_h, *biases[1:])
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * torch.empty_like(before) + i.sigmoid() * g.tanh()
        x = o.sigmoid() * c.tanh()
        states.append(x.select(time, -1))
        cells.append(c.select(time, -1))
    return x, (torch.stack(states), torch.stack(cells))


def activation_bytes(module: nn.Module, batch: Inputs) -> int:
    """Bytes that autograd keeps for the backward pass of one batch, each storage once, parameters not counted."""
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their storages' addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in own:
            kept[key] = tensor
        return tensor

    module.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(module, batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@dataclass(frozen=True)
class DeviceClass:
    """A kind of client device and its limits R_i; a limit that is ``None`` does not bind.

    Attributes:
        name: for people.
        count: how many clients are of this class.
        memory: bytes for training, compared with ``Cost.memory``.
        compute: multiply-accumulates per example, compared with ``Cost.macs``.
        bandwidth: bytes a round, compared with ``Cost.bytes_down + Cost.bytes_up``.
    """

    name: str
    count: int
    memory: int | None = None
    compute: int | None = None
    bandwidth: int | None = None

    def fits(self, cost: Cost) -> bool:
        """R(M) <= R_i in every resource."""
        return not self.exceeded(cost)

    def exceeded(self, cost: Cost) -> list[str]:
        """The limits that a sub-model breaks, in words."""
        needs = (
            ("memory", cost.memory, self.memory, "B"),
            ("compute", cost.macs, self.compute, "MAC"),
            ("bandwidth", cost.bytes_down + cost.bytes_up, self.bandwidth, "B"),
        )
        return [
            f"{resource} {human(need, unit)}, has {human(limit, unit)}"
            for resource, need, limit, unit in needs
            if limit is not None and need > limit
        ]


def assign(devices: list[DeviceClass], levels: list[Cost]) -> list[int]:
    """For each device class the level of the largest sub-model that fits all its limits.

    Raises:
        ConfigError: when not even the smallest fits, saying what that one would need.
    """
    chosen = []
    for device in devices:
        fitting = [cost.level for cost in levels if device.fits(cost)]
        if not fitting:
            smallest = levels[0]
            raise ConfigError(
                f"device class {device.name!r}: no level fits; the smallest (level {smallest.level}) needs "
                f"{'; '.join(device.exceeded(smallest))}. Add a smaller level (split.levels) or raise the limit"
            )
        chosen.append(max(fitting, key=lambda level: (levels[level].parameters, level)))
    return chosen


_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def human(value: float, unit: str = "") -> str:
    """A number with a decimal prefix: 4910922 -> ``4.91 M``."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:g} {unit}".strip()


def parse_quantity(value: object, what: str, units: tuple[str, ...]) -> int:
    """A plain number, or one with a decimal prefix and unit: ``"200 MB"``, ``"20 MMAC"``."""
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        text = value.strip().lower()
        for unit in (*units, ""):
            stem = text.removesuffix(unit.lower()).strip()
            digits = stem.rstrip("kmgt")
            if text.endswith(unit.lower()) and stem[len(digits) :] in _PREFIXES:
                try:
                    number = float(digits) * _PREFIXES[stem[len(digits) :]]
                except ValueError:
                    continue
                break
    if number is None or not math.isfinite(number) or number <= 0:
        raise ConfigError(f"{what}: got {value!r}, expected a number > 0 such as 5000000 or '5 M{units[0]}'")
    return int(number)
