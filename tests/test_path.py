"""A smaller level's model inside a larger one computes as if it stood alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from incofl.engine.federation import Job
from incofl.engine.worker import Worker
from incofl.methods.fjord import PATHS
from incofl.path import within
from tests.federations import tiny_federation


def test_a_slice_in_a_slice() -> None:
    small = (slice(0, 2), torch.tensor([0, 1, 8, 9]))
    large = (slice(0, 4), torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]))
    rows, columns = within(small, large, (8, 16))
    assert rows == slice(0, 2)
    assert isinstance(columns, Tensor)
    assert columns.tolist() == [0, 1, 4, 5]
    with pytest.raises(ValueError, match="not part of"):
        within((slice(2, 6),), (slice(0, 4),), (8,))


@pytest.mark.parametrize("method", ["fjord", "heteroavg+anchor"])
def test_a_narrow_path_has_the_format_of_the_narrow_model(method: str) -> None:
    """A wide model computes channels-last; of the narrow one's strided 1x1 convolutions that is not safe."""
    levels = ("split.kind=hetero", "split.levels=[0.25,1.0]", "split.counts=[1,1]")
    federation = tiny_federation(
        f"method={method}", "model.width=4", *levels, "data.clients=2", "data.limit=200", "cohort=2"
    )
    worker, seen = Worker(federation), dict[str, list[bool]]()
    wide = worker.module(1, 0)
    narrow = vars(wide)[PATHS][0].module if method == "fjord" else worker.module(0, 0)

    def watch(name: str, module: nn.Module) -> None:
        def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            last = [not x.is_contiguous() for x in (inputs[0], layer.weight)]  # no length is 1 but those of the kernel
            seen.setdefault(name, []).append(any(last))

        module.get_submodule("layer2.0.downsample.0").register_forward_pre_hook(note)

    watch("wide", wide)
    watch("narrow", narrow)
    worker.train(federation.start(), Job(1, 1, 0))
    assert all(seen["wide"])
    assert not any(seen["narrow"])
