"""One look for all figures: palette, grid, panels, one legend below, white background."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours can be told apart with any colour vision; markers say the same again.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#8A7F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HEAT = "cividis"  # has equal steps in lightness and looks alike with any colour vision
DPI = 150
MARGINS, NARROWEST = (0.8, 1.2), 6.0  # inches around the panels, and for the title
STYLE = Path(__file__).with_name("figures.mplstyle")


@contextmanager
def drawn(
    path: Path, title: str, size: tuple[float, float], count: int = 1, columns: int = 4, **subplots: Any
) -> Iterator[list["Axes"]]:
    """Gives ``count`` panels of a size in inches; in the end drops the empty ones, adds the legend and writes a PNG."""
    from matplotlib import style
    from matplotlib.figure import Figure

    shape = -(-count // columns), min(count, columns)
    width, height = (margin + number * side for margin, number, side in zip(MARGINS, shape[::-1], size, strict=True))
    with style.context(STYLE):
        figure = Figure((max(width, NARROWEST), height), layout="constrained", facecolor="white")
        figure.suptitle(title, x=0.01, ha="left", wrap=True)
        panels = list(figure.subplots(*shape, squeeze=False, **subplots).flat)
        yield panels
        for empty in (panel for panel in panels if not panel.has_data()):
            empty.remove()
        drawings = [panel.get_legend_handles_labels() for panel in figure.axes]
        if looks := {label: handle for known in drawings for handle, label in zip(*known, strict=True)}:
            fit = int(figure.get_figwidth() * 15 / (6 + max(map(len, looks))))  # this many labels fill its width
            figure.legend(looks.values(), looks.keys(), loc="outside lower center", ncols=max(1, min(fit, len(looks))))
        # Without matplotlib's version in the metadata, equal figures are equal files.
        figure.savefig(path, dpi=DPI, metadata={"Title": title, "Software": None})


def look(place: int, **style: Any) -> dict[str, Any]:
    """Returns the colour and the marker of the curve at a place, and more style."""
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)], **style}


def short(name: str) -> str:
    """Returns the name of a layer as figures show it."""
    return name.removesuffix(".weight")


def layer_axis(axes: "Axes", names: Sequence[str]) -> None:
    """Puts layers on the vertical axis, from top to bottom."""
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
