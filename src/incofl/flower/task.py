"""What a user of Flower has already, in one value: a model, examples, perhaps an optimiser."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from incofl.client import LocalSettings
from incofl.config import Config
from incofl.data import OWN, Dataset, Examples, Pipeline, Source, Tokens, View, describe_own
from incofl.engine.build import build_method, build_model, build_splitter, client_levels
from incofl.engine.federation import Federation
from incofl.errors import ConfigError, DataError
from incofl.models.custom import name_factory

Given = Examples | tuple[Tensor, Tensor] | Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class AsTheyAre:
    """Examples reach the model as numbers of torch's default type, and unchanged otherwise."""

    def test(self, x: Tensor) -> Tensor:
        """A batch."""
        return x.to(torch.get_default_dtype())

    def train(self, x: Tensor, generator: Generator) -> Tensor:
        """The same."""
        return self.test(x)


@dataclass(frozen=True)
class Task:
    """A model of your own for examples of your own. Import the module that makes it on the server and on nodes.

    Attributes:
        model: makes the module; its parameters may ask for ``shape``, ``classes`` and what else a config's model has.
        shape: of one example as the model gets it.
        classes: how many there are to tell.
        data: the training examples of a node, from its Flower context: two tensors x and y, or an iterable of batches
            (x, y) such as a ``DataLoader``. Called in every turn.
        test: the test examples of the server, likewise; without it, the server evaluates nothing.
        held_out: the test examples of a node, likewise: before it trains, a node evaluates the model that it was sent.
        optimizer: makes the optimiser of a turn from the parameters; without it, the config's ``local`` says.
        pipeline: how examples reach the model: normalisation, augmentation. Without it, as they are.
        vocabulary: how many tokens there are, where examples are texts.
        sequence: whether every position of a text has a class of its own.
    """

    model: Callable[..., nn.Module]
    shape: tuple[int, ...]
    classes: int
    data: Callable[[Any], Given]
    test: Callable[[], Given] | None = None
    held_out: Callable[[Any], Given] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    pipeline: Pipeline | None = None
    vocabulary: int = 0
    sequence: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # whatever kind of sequence it was

    def introduce(self) -> None:
        """From now on, in this process, these examples are what ``own`` means in a config."""
        describe_own(self.source)

    @property
    def overrides(self) -> list[str]:
        """What a config must say for this model and these examples to be meant."""
        return [f"model.name={name_factory(self.model)}", f"data.name={OWN}", "data.partition=iid"]

    @property
    def source(self) -> Source:
        """As an entry of the table of data sets."""
        view = View(self.shape, self.made_pipeline)
        return Source(
            summary="examples of your own",
            classes=self.classes,
            view=lambda side: view,
            load=lambda root: (no_examples(), no_examples()),
            vocabulary=self.vocabulary,
            model=name_factory(self.model),
            sequence=self.sequence,
        )

    @property
    def made_pipeline(self) -> Pipeline:
        """How examples reach the model."""
        return self.pipeline or (Tokens() if self.vocabulary else AsTheyAre())

    def server_data(self) -> Dataset:
        """What the server has."""
        test = no_examples() if self.test is None else as_examples(self.test(), "test")
        return Dataset(OWN, no_examples(), test, self.classes, self.made_pipeline)

    def node_data(self, context: Any) -> Dataset:
        """What a node has."""
        train = as_examples(self.data(context), "data")
        test = no_examples() if self.held_out is None else as_examples(self.held_out(context), "held_out")
        return Dataset(OWN, train, test, self.classes, self.made_pipeline)

    def settings(self, settings: LocalSettings) -> LocalSettings:
        """How clients train, with the user's optimiser if there is one."""
        if self.optimizer is None:
            return settings
        return OwnOptimizer(**dataclasses.asdict(settings), make=self.optimizer)


@dataclass(frozen=True)
class OwnOptimizer(LocalSettings):
    """Local settings with an optimiser of the user's own.

    ``lr`` must still be its learning rate where a method computes with it (Scaffold).
    """

    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.SGD

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new one for every turn."""
        return self.make(parameters)


def no_examples() -> Examples:
    """None at all."""
    return Examples(torch.empty(0), torch.empty(0, dtype=torch.int64))


def as_examples(given: Given, what: str) -> Examples:
    """Examples as tensors, from what the user has."""
    if isinstance(given, Examples):
        return given
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given)):
        try:
            batches = [(x, y) for x, y in given]
            given = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        except (TypeError, ValueError, RuntimeError) as problem:
            raise DataError(
                f"{what}: expected tensors (x, y) or batches of them, got {type(given)} ({problem})"
            ) from None
    x, y = given
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or len(x) != len(y) or y.is_floating_point():
        raise ConfigError(f"{what}: expected as many examples as labels, and labels that are whole numbers")
    return Examples(x, y)


def build_own(config: Config, task: Task) -> Federation:
    """The federation of a user's own model and examples, without examples but those of the server's test set."""
    if config.model.pretrained is not None:
        raise ConfigError(f"model.pretrained: got {config.model.pretrained!r}, expected none: load it in your factory")
    model = build_model(config)
    splitter, method = build_splitter(config, model), build_method(config)
    if method.server.buffers == "static" and model.layout.buffers:
        raise ConfigError("buffers: got 'static', expected another: the server has no examples to measure them on")
    method.client.check(model.template, model.example(2))
    return Federation(
        model=model,
        splitter=splitter,
        method=method,
        data=task.server_data(),
        partition=[torch.empty(0, device="meta")] * config.data.clients,
        levels=client_levels(config, len(splitter.depths)),
        local=task.settings(config.local),
        seed=config.seed,
        device=config.engine.device,
    )
