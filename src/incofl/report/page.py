"""The report as one HTML file: figures, tables and text, with the styles, the script and plotly.js inside."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import incofl
from incofl.analysis.analyze import default_out
from incofl.analysis.runs import Folders
from incofl.engine.checkpoint import atomic_write
from incofl.errors import needs_extra
from incofl.report import tables
from incofl.report.figures import CURVES, Figure, by_level, cohorts, of_section
from incofl.report.runs import Groups, ReportedRun, read_groups

# The pictures that ``incofl analyze`` draws, and what each shows.
PICTURES = {
    "similarity": "Similarity of client models: mean linear CKA over pairs of clients, from shallow to deep layers.",
    "similarity-heatmaps": "Linear CKA of each pair of client models, by depth; clients from small to large.",
    "similarity-accuracy": "Mean CKA against test accuracy; a point is a recorded round.",
    "features": "Features of one class under clients of three sizes, by t-SNE.",
    "updates": "Distributions of the aggregated updates by round: shallow layers, and deep ones of their group.",
    "smoothness": "Smoothness of the aggregated updates by layer; less is smoother.",
    "coefficients": "InCo's theta and beta by layer, and the size of what InCo or noise adds.",
    "cross_environment": "Similarity of the updates of two settings, by layer.",
    "relations": "Similarity of the updates of two settings against their statistics; a point is a layer.",
}
NOT_ANALYSED = "<p>Similarity, features, updates and InCo by layer: add them with <code>incofl analyze RUN</code>.</p>"


def write_report(folders: Folders, out: str | Path = "report.html", title: str | None = None, **objects: Any) -> Groups:
    """Reads run folders, or folders that hold some, and writes the page; returns what is on it.

    Costs of runs that were made from objects need these: ``model``, ``data``, ``method``, ``task``, as for ``analyze``.
    """
    groups = read_groups(folders, **objects)
    atomic_write(Path(out).expanduser(), make_page(groups, title).encode())
    return groups


def make_page(groups: Groups, title: str | None = None) -> str:
    """Returns the page about some runs."""
    with needs_extra("report", "report"):
        from plotly.offline import get_plotlyjs
    template, css, script = (
        Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    drawn = {section: of_section(section, groups) for section in CURVES}
    drawn |= {"levels": by_level(groups), "cohorts": [cohorts(groups)]}
    grid = '<div class="grid">{}</div>'
    cards = {part: grid.format("".join(map(_card, found))) if found else "" for part, found in drawn.items()}
    sections = {
        "Results": f"<p>{escape(_how(groups))}</p>{tables.results(groups)}",
        "Over the rounds": cards["curves"],
        "By level": cards["levels"],
        "Layers": tables.similarity(groups) + _pictures(groups) or NOT_ANALYSED,
        "InCo": cards["inco"],
        "Communication and time": cards["communication"],
        "Sizes": tables.sizes(groups),
        "Clients": cards["cohorts"] + tables.rejected(groups),
        "Fleet": cards["fleet"] and cards["fleet"] + tables.nodes(groups),
        "Config": tables.configs(groups),
        "Environment": tables.environments(groups),
    }
    parts = [(name, name.lower().replace(" ", "-"), text) for name, text in sections.items() if text]
    chip = '<button type="button" aria-pressed="true" data-group="{}">{}{}</button>'
    chips = "".join(chip.format(group.index, tables.swatch(group.index), escape(group.label)) for group in groups)
    section = '<section aria-labelledby="{1}"><h2 id="{1}">{0}</h2><div class="stack">{2}</div></section>'
    shown = [asdict(figure) for found in drawn.values() for figure in found]
    return Template(template).substitute(
        title=escape(title or _title(groups)),
        css=css,
        provenance=_provenance(groups.runs),
        links="".join(f'<li><a href="#{id}">{name}</a></li>' for name, id, _ in parts),
        legend=f'<div class="legend" role="group" aria-label="Runs to show">{chips}</div>' if len(groups) > 1 else "",
        sections="".join(section.format(*part) for part in parts),
        # JSON that cannot end the element it stands in.
        figures=json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        # The only text in it that would end the script element early stands in strings, where this means the same.
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        script=script,
    )


def _pictures(groups: Groups) -> str:
    """Returns the pictures that ``incofl analyze`` wrote."""
    folders = {"All runs": default_out(groups.runs)} if len(groups.runs) > 1 else {}
    for group in groups:
        one = f" (one of {len(group.runs)} seeds)" if group.several else ""
        folders[group.label + one] = group.runs[0].path / "analysis"
    shown = ""
    for title, folder in folders.items():
        parts = ""
        for name, caption in PICTURES.items():
            if (path := folder / f"{name}.png").exists():
                data, note = base64.b64encode(path.read_bytes()).decode(), escape(caption)
                parts += f'<figure class="card picture"><figcaption class="caption">{note}</figcaption>'
                parts += f'<img alt="{note}" src="data:image/png;base64,{data}"></figure>'
        shown += f'<h3>{escape(title)}</h3><div class="grid">{parts}</div>' if parts else ""
    return shown


def _title(groups: Groups) -> str:
    data = dict.fromkeys(str(run.values["data.name"]) for run in groups.runs)
    names = [group.label for group in groups] if len(groups) <= 3 else [f"{len(groups)} configurations"]
    return f"{', '.join(names)} on {', '.join(data)}"


def _provenance(runs: Sequence[ReportedRun]) -> str:
    known = [facts for run in runs if (facts := run.json("environment.json")).get("commit")]
    commits = dict.fromkeys(str(e["commit"])[:10] + (" with changes" if e.get("modified") else "") for e in known)
    made = f"incofl {incofl.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    where = f"<code>{escape(str(runs[0].path))}</code>" if len(runs) == 1 else f"{len(runs)} run folders"
    return f"{made}, from {where}" + (f"; computed at commit {escape(', '.join(commits))}" if commits else "")


def _how(groups: Groups) -> str:
    """Says what was run, in a sentence or two."""
    keys = ("model.name", "data.name", "data.partition", "data.clients")
    (model, data, partition, clients), *others = {tuple(run.values.get(key) for key in keys) for run in groups.runs}
    what = "" if others else f"{model}, {data}, {partition} partition, {clients} clients. "
    seeds = " Several seeds: mean ± half width of the 95 % confidence interval (Student's t)." * groups.several
    metric, unit = groups.metric
    return f"{what}Test {metric}{' in percent' * (unit == 'percent')}; by level: {groups.measure}.{seeds}"


def _card(figure: Figure) -> str:
    own, title = f"figure-{figure.id}", escape(figure.title)
    panels = "".join(
        f'<div class="panel">{f"<h4>{escape(panel.title)}</h4>" if panel.title else ""}'
        f'<div class="plot" id="{own}-{at}" role="img" tabindex="0" style="min-height:{panel.height}px" '
        f'aria-label="{escape(figure.describe(panel))}"></div></div>'
        for at, panel in enumerate(figure.panels)
    )
    return (
        f'<figure class="card {figure.kind}{" wide" if figure.wide else ""}" id="{own}" aria-labelledby="{own}-title">'
        f'<h3 id="{own}-title">{title}</h3><figcaption class="caption">{escape(figure.caption)}</figcaption>'
        f'<div class="panels">{panels}</div><div class="tools"><details><summary>Data'
        f'<span class="hidden"> of {title}</span></summary><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{title}"></div></details><button type="button" class="tool">Save as SVG<span class="hidden">: '
        f"{title}</span></button></div></figure>"
    )
