"""Your own model, in plain torch: no layout is needed, and a layout by hand gives the same run bit for bit."""

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
    """A factory: it is called with what its parameters name."""
    blocks = [Block(32) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], 32), *blocks, nn.Linear(32, classes))


def by_hand(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, incofl.Layout]:
    """The same model with its layout."""
    stream, out = incofl.Axis("stream", 32), incofl.Axis("classes", classes, fixed=True)
    model = inferred(shape, classes)
    axes: dict[str, incofl.Axes] = {"1.weight": (stream, None), "1.bias": (stream,), "6.weight": (out, stream)}
    axes["6.bias"] = (out,)
    for block in ("2", "3", "4", "5"):
        inner = incofl.Axis(f"{block}.inner", 64)
        axes |= {f"{block}.norm.weight": (stream,), f"{block}.norm.bias": (stream,), f"{block}.up.bias": (inner,)}
        axes |= {f"{block}.up.weight": (inner, stream), f"{block}.down.weight": (stream, inner)}
        axes |= {f"{block}.down.bias": (stream,)}
    shallow = {f"{b}.{part}.weight": f"2.{part}.weight" for b in "345" for part in ("up", "down")}
    return model, incofl.Layout.of(model, axes, ["2345"], shallow)


if __name__ == "__main__":
    states = []
    for factory in (inferred, by_hand):
        name = factory.__name__
        result = incofl.run({"rounds": 10}, out=f"runs/own-{name}", model=factory, resume=True, progress=False)
        print(f"{name:8}  accuracy {result['accuracy']:.3f}, {len(result['accuracy_by_level'])} levels")
        states.append(result.model().state_dict())
    print("equal bit for bit:", all(states[0][name].equal(states[1][name]) for name in states[1]))
