"""The look of all figures: one palette, one grid, labels with units, on white."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours: distinguishable with any colour vision. Markers say the same again.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#8A7F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HEAT = "cividis"  # of equal steps in lightness, seen alike with any colour vision
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
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@contextmanager
def drawn(path: Path, width: float, height: float, title: str) -> Iterator[Figure]:
    """A figure in this look, in inches, which is written to a PNG file when it is done."""
    with mpl.rc_context(STYLE):
        figure = Figure((width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the drawing program's version equal figures are equal files.
        figure.savefig(path, dpi=DPI, metadata={"Title": title, "Software": None})


def panels(figure: Figure, count: int, columns: int = 4, *, share: bool = False) -> list[Axes]:
    """So many panels in rows."""
    columns = min(count, columns)
    grid = figure.subplots(-(-count // columns), columns, squeeze=False, sharex=share, sharey=share)
    axes: list[Axes] = list(grid.flat)
    for left_over in axes[count:]:
        left_over.remove()
    return axes[:count]


def colour(place: int) -> str:
    """Of the line at a place."""
    return PALETTE[place % len(PALETTE)]


def marker(place: int) -> str:
    """Of the line at a place."""
    return MARKERS[place % len(MARKERS)]
