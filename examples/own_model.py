"""A model of your own, in plain torch: no layout is needed, and a layout by hand gives the same run bit for bit."""

from torch import Tensor, nn

import incofl


class Block(nn.Module):
    """A perceptron around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and what the block adds to it."""
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


def inferred(shape: tuple[int, ...], classes: int) -> nn.Module:
    """What ``model.name`` names; the parameters tell what the model wants to know about the data."""
    blocks = [Block(32) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], 32), *blocks, nn.Linear(32, classes))


def by_hand(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, incofl.Layout]:
    """The same model with its layout."""
    model = inferred(shape, classes)
    stream, out = incofl.Axis("stream", 32), incofl.Axis("classes", classes, fixed=True)
    axes: dict[str, incofl.Axes] = {"1": (stream, None), "6": (out, stream)}  # outputs and inputs of layers
    for block in "2345":
        inner = incofl.Axis(f"{block}.inner", 64)
        axes |= {f"{block}.norm": (stream,), f"{block}.up": (inner, stream), f"{block}.down": (stream, inner)}
    shallow = {f"{b}.{part}.weight": f"2.{part}.weight" for b in "345" for part in ("up", "down")}
    return model, incofl.Layout.of(model, axes, ["2345"], shallow)


if __name__ == "__main__":
    states = []
    for factory in ("inferred", "by_hand"):
        config = {"method": "incoavg", "rounds": 10, "model": {"name": f"own_model:{factory}"}}
        result = incofl.run(config, out=f"runs/own-{factory}", resume=True)
        print(f"{factory:8}  accuracy {result['accuracy']:.3f}, {len(result['accuracy_by_level'])} levels")
        states.append(incofl.load_model(f"runs/own-{factory}").state_dict())
    print("equal bit for bit:", all(states[0][name].equal(states[1][name]) for name in states[1]))
