import pytest
import torch

from incofl.errors import LayoutError
from incofl.layout import Axis, Layout
from incofl.models import ModelOptions, make_model


def layout(**changes: object) -> Layout:
    fields: dict[str, object] = {
        "axes": {"w": (Axis("a", 2), None)},
        "shapes": {"w": (2, 3)},
        "stages": (),
        "shallow": {},
        "buffers": frozenset(),
    }
    return Layout(**(fields | changes))  # type: ignore[arg-type]


def test_axes_must_agree_with_shapes() -> None:
    with pytest.raises(LayoutError, match=r"'w' has shape \(3, 3\)"):
        layout(shapes={"w": (3, 3)})
    with pytest.raises(LayoutError, match="'w' has shape"):
        layout(axes={"w": (None,)})


def test_classes_are_never_narrowed() -> None:
    with pytest.raises(LayoutError, match="'classes' of 'w' would be narrowed, expected fixed=True"):
        layout(axes={"w": (Axis("classes", 2), None)})
    assert layout(axes={"w": (Axis("classes", 2, fixed=True), None)}).axes["w"][0]


def test_counterparts_must_have_one_shape() -> None:
    with pytest.raises(LayoutError, match="must be parameters of one shape"):
        layout(axes={"w": (None,), "v": (None,)}, shapes={"w": (2,), "v": (3,)}, shallow={"w": "v"})
    with pytest.raises(LayoutError, match="must be parameters of one shape"):
        layout(shallow={"missing": "gone"})


def test_resnet_layout_covers_every_entry() -> None:
    """Every channel dimension of every entry has a named axis; only kernels' extents and counters have none."""
    found = make_model("resnet26", ModelOptions(width=0.125)).layout
    for name, axes in found.axes.items():
        named = sum(axis is not None for axis in axes)
        assert named == min(len(found.shapes[name]), 2), name
    assert found.depth == (3, 3, 3, 3)
    assert found.blocks[:4] == ("layer1.0", "layer1.1", "layer1.2", "layer2.0")
    assert found.block_of["layer4.2.bn2.running_var"] == "layer4.2"
    assert found.block_of["fc.weight"] is None
    assert "bn1.num_batches_tracked" in found.buffers
    assert "bn1.weight" in found.parameters


def test_block_names_are_not_confused_by_common_beginnings() -> None:
    """blocks.1 is not a prefix of blocks.10 in the sense that matters."""
    module = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(12)])})
    found = Layout.of(module, {}, [[f"blocks.{i}" for i in range(12)]], {})
    assert found.block_of["blocks.10.weight"] == "blocks.10"
    assert found.block_of["blocks.1.weight"] == "blocks.1"


def test_an_axis_has_one_number_of_units() -> None:
    axes = {"w": (Axis("a", 2),), "v": (Axis("a", 3),)}
    with pytest.raises(LayoutError, match="axis 'a' has 3 units in 'v', 2 elsewhere"):
        layout(axes=axes, shapes={"w": (2,), "v": (3,)})


def test_tied_parameters_are_one_entry() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    layout = Layout.of(model, {}, [], {})
    assert layout.tied == {"1.weight": "0.weight"}
    assert layout.axes.keys() == {"0.weight", "0.bias", "1.bias"}


def test_counterparts_across_blocks() -> None:
    """The same weight of the first block where it has this shape: the downsampling first block of a stage differs."""
    found = make_model("resnet26", ModelOptions(width=0.125)).layout.across_blocks
    assert found["layer1.2.conv1.weight"] == "layer1.0.conv1.weight"
    assert found["layer2.2.conv1.weight"] == "layer2.1.conv1.weight"
    assert found["layer2.1.conv2.weight"] == "layer2.0.conv2.weight"
    assert "layer2.1.conv1.weight" not in found
    assert not any(".bn" in name for name in found)


def test_axes_of_layers() -> None:
    """Weights have outputs, inputs and a whole kernel, vectors the outputs; the axes of an entry come first."""
    stream, image = Axis("stream", 4), Axis("image", 3)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    axes = {"0": (stream, image), "1": (stream,), "2": (None, stream), "1.running_var": (None,)}
    found = Layout.of(module, axes, (), {}).axes
    assert found["0.weight"] == (stream, image, None, None)
    assert found["0.bias"] == found["1.weight"] == found["1.running_mean"] == (stream,)
    assert found["1.num_batches_tracked"] == ()
    assert (found["2.weight"], found["2.bias"], found["1.running_var"]) == ((None, stream), (None,), (None,))
