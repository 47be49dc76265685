"""The report as one HTML file: figures, tables and text, with the styles, the script and plotly.js inside."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from incofl.analysis.report_figures import COLOURS, DASHES, SYMBOLS, Figure
from incofl.errors import RunError


@dataclass(frozen=True)
class Section:
    """A heading with figures, and with text and tables as HTML."""

    id: str
    title: str
    figures: Sequence[Figure] = ()
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Cells:
    """A row of a table: its first cell names it."""

    cells: Sequence[str]
    kind: str = ""
    swatch: int | None = None


def page(title: str, provenance: str, lead: str, legend: Sequence[tuple[int, str]], sections: Sequence[Section]) -> str:
    """The whole document.

    Args:
        title: of the page.
        provenance: where it comes from, in a line.
        lead: HTML between the title and the first section.
        legend: index and label of each group that can be switched off.
        sections: in order.
    """
    figures = [figure for section in sections for figure in section.figures]
    links = "".join(f'<li><a href="#{section.id}">{escape(section.title)}</a></li>' for section in sections)
    chips = "".join(
        f'<button type="button" aria-pressed="true" data-group="{at}">{swatch(at)}{escape(label)}</button>'
        for at, label in legend
    )
    chips = f'<div class="legend" role="group" aria-label="Runs to show">{chips}</div>' if len(legend) > 1 else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("report.css")}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header>
<h1>{escape(title)}</h1>
<button type="button" class="tool" id="scheme">Colours</button>
<p class="provenance">{provenance}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main id="main">
{lead}
{chips}
{"".join(map(_section, sections))}
</main>
<footer>{FOOTER}</footer>
<p class="hidden" id="live" aria-live="polite"></p>
<script type="application/json" id="figures">{_values(figures)}</script>
<script>{plotly_js()}</script>
<script>
{_asset("report.js")}</script>
</body>
</html>
"""


FOOTER = """<p>Drag in a figure to zoom, double-click to see all again. With the keyboard: Tab to a figure, then the
left and right arrow keys. Accuracy is that of the server model cut to each level, on the test set; “last ten” is the
mean of the evaluations in the last ten rounds.</p>"""


def plotly_js() -> str:
    """The library that draws, whole."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise RunError("report: needs plotly, which is not installed; pip install 'incofl[report]'") from None
    # The only text in it that would end the script element early stands in strings, where this means the same.
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (resources.files("incofl.analysis") / name).read_text(encoding="utf-8")


def _values(figures: Sequence[Figure]) -> str:
    """JSON that cannot end the element it stands in."""
    values = [dataclasses.asdict(figure) for figure in figures]
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _section(section: Section) -> str:
    cards = "".join(map(_card, section.figures))
    grid = f'<div class="grid">{cards}</div>' if cards else ""
    return (
        f'<section aria-labelledby="{section.id}"><h2 id="{section.id}">{escape(section.title)}</h2>'
        f'<div class="stack">{section.before}{grid}{section.after}</div></section>'
    )


def _card(figure: Figure) -> str:
    own, many = f"figure-{figure.id}", len(figure.panels) > 1
    panels = "".join(
        f'<div class="panel">{f"<h4>{escape(panel.title)}</h4>" if panel.title else ""}'
        f'<div class="plot" id="{own}-{at}" role="img" tabindex="0" style="min-height:{panel.height}px" '
        f'aria-label="{escape(f"{figure.title}, {panel.title}" if many and at else figure.alt)}"></div></div>'
        for at, panel in enumerate(figure.panels)
    )
    return (
        f'<figure class="card{" wide" if figure.wide else ""}" id="{own}" aria-labelledby="{own}-title">'
        f'<h3 id="{own}-title">{escape(figure.title)}</h3><figcaption class="caption">{escape(figure.caption)}'
        f'</figcaption><div class="panels" style="--least:{figure.width}px">{panels}</div><div class="tools">'
        f'<details><summary>Data<span class="hidden"> of {escape(figure.title)}</span></summary>'
        f'{scroll("", figure.title)}</details><button type="button" class="tool">Save as SVG<span class="hidden">'
        f": {escape(figure.title)}</span></button></div></figure>"
    )


def scroll(table: str, label: str, *, whole: bool = False) -> str:
    """A table that scrolls by itself where it is too wide, by keyboard too."""
    kind = "scroll whole" if whole else "scroll"
    return f'<div class="{kind}" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def table(head: Sequence[str], rows: Sequence[Cells], kind: str = "", text: Sequence[int] = ()) -> str:
    """A table; the columns in ``text`` are words, the others numbers."""

    def mark(at: int) -> str:
        return ' class="text"' if at in text else ""

    headings = "".join(f'<th scope="col"{mark(at)}>{escape(cell)}</th>' for at, cell in enumerate(head))
    body = ""
    for row in rows:
        first, *rest = row.cells
        sign = swatch(row.swatch) if row.swatch is not None else ""
        cells = "".join(f"<td{mark(at)}>{escape(cell)}</td>" for at, cell in enumerate(rest, 1))
        body += f'<tr class="{row.kind}"><th scope="row">{sign}{escape(first)}</th>{cells}</tr>'
    return f'<table class="{kind}"><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>'


_DASHES = {
    "solid": "",
    "dash": "7 4",
    "dot": "2 3",
    "dashdot": "7 3 2 3",
    "longdash": "11 4",
    "longdashdot": "11 3 2 3",
}
_MARKERS = {
    "circle": '<circle cx="17" cy="6" r="3.5"/>',
    "square": '<path d="M13.5 2.5h7v7h-7z"/>',
    "diamond": '<path d="M17 1.5 21.5 6 17 10.5 12.5 6z"/>',
    "triangle-up": '<path d="M17 1.5 21.5 10h-9z"/>',
    "x": '<path d="m13.5 2.5 7 7m0-7-7 7" stroke-width="2.5"/>',
    "cross": '<path d="M17 1.5v9M12.5 6h9" stroke-width="2.5"/>',
    "star": '<path d="m17 1 1.5 3.4 3.5.4-2.600 2.400.7 3.600L17 9l-3.100 1.800.7-3.600L12 4.800l3.500-.4z"/>',
}


def swatch(index: int) -> str:
    """The colour, dash and marker of a group, as its curves have them."""
    colour, dash, marker = (f"var(--c{index % COLOURS})", _DASHES[DASHES[index % len(DASHES)]], SYMBOLS[index % 7])
    return (
        f'<svg viewBox="0 0 34 12" aria-hidden="true" style="color:{colour}" fill="currentColor" stroke="currentColor">'
        f'<path d="M1 6h32" stroke-width="2.4" stroke-dasharray="{dash}"/>'
        f'<g stroke-width="0">{_MARKERS[marker]}</g></svg>'
    )
