"""The residual perceptron."""

import pytest

from incofl.errors import ConfigError
from incofl.models import ModelOptions, make_model


def test_layer_norm_keeps_no_statistics() -> None:
    """So that it can be trained with privacy; the blocks, axes and closing layers are the same."""
    batch, layer = (make_model("tiny-mlp", ModelOptions(options={"norm": norm})).layout for norm in ("batch", "layer"))
    assert batch.buffers
    assert not layer.buffers
    assert batch.parameters == layer.parameters
    assert (batch.stages, batch.closing) == (layer.stages, layer.closing)
    assert all(batch.axes[name] == layer.axes[name] for name in layer.axes)


def test_another_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.options.norm: got 'instance', expected one of batch, layer"):
        make_model("tiny-mlp", ModelOptions(options={"norm": "instance"}))
