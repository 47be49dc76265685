"""One look for all figures: palette, grid, labels with units, white background."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

# Okabe and Ito's colours can be told apart with any colour vision; markers say the same again.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#8A7F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HEAT = "cividis"  # has equal steps in lightness and looks alike with any colour vision
DPI = 150
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "figure.titlesize": 10.5,
}


@contextmanager
def drawn(path: Path, width: float, height: float, title: str) -> Iterator[Figure]:
    """Gives a figure of a size in inches, and writes it to a PNG file at the end."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure((width, height), layout="constrained", facecolor="white")
        figure.suptitle(title, x=0.01, ha="left")
        yield figure
        # Without matplotlib's version in the metadata, equal figures are equal files.
        figure.savefig(path, dpi=DPI, metadata={"Title": title, "Software": None})


def panels(figure: Figure, count: int, columns: int = 4) -> list[Axes]:
    """Returns ``count`` axes in rows of at most ``columns``."""
    columns = min(count, columns)
    axes = list(figure.subplots(-(-count // columns), columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def look(place: int, **style: Any) -> dict[str, Any]:
    """Returns the colour and the marker of the curve at a place, and more style."""
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)], **style}


def legend(figure: Figure, looks: Mapping[str, Mapping[str, Any]], columns: int = 5) -> None:
    """Puts a legend below a figure: the look of each label."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))


def short(name: str) -> str:
    """Returns the name of a layer as figures show it."""
    return name.removesuffix(".weight")


def layer_axis(axes: Axes, names: Sequence[str], size: float = 8) -> None:
    """Puts layers on the vertical axis, from top to bottom."""
    axes.set_yticks(range(len(names)), [short(name) for name in names], fontsize=size)
    axes.set_ylim(len(names) - 0.5, -0.5)


SHALLOW, DEEP = look(0, ls=""), look(1, ls="")
MARK: dict[str, Any] = {"color": "black", "marker": "|", "ls": "", "ms": 9, "mew": 1.4}


def draw_ranges(axes: Axes, group_of: Mapping[str, str], ranges: Mapping[str, Sequence[float]]) -> None:
    """Draws low, middle and high value of each layer as a dot on a bar; shallow layers are their own group."""
    for place, name in enumerate(group_of):
        if name in ranges:
            (low, middle, high), style = ranges[name], SHALLOW if name == group_of[name] else DEEP
            axes.hlines(place, low, high, color=style["color"], lw=2, alpha=0.45)
            axes.plot(middle, place, **style)


def finish_layers(figure: Figure, marks: Mapping[str, float], meaning: str) -> None:
    """Names the layers of a figure, marks a value of each in its first panel, and adds the legend."""
    for place, mark in enumerate(marks.values()):
        figure.axes[0].plot(mark, place, **MARK)
    layer_axis(figure.axes[0], list(marks))
    legend(figure, {"shallow layer": SHALLOW, "deep layer": DEEP, meaning: MARK})
