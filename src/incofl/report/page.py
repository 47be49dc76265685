"""The report as one HTML file: figures, tables and text, with the styles, the script and plotly.js inside."""

import base64
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import incofl
from incofl.analysis.analyze import default_out
from incofl.analysis.runs import Folders, Groups, read_groups
from incofl.engine.files import atomic_write
from incofl.errors import RunError, needs_extra
from incofl.report import tables
from incofl.report.figures import CURVES, by_level, cohorts, of_section


def write_report(folders: Folders, out: str | Path = "report.html", title: str | None = None, **objects: Any) -> Groups:
    """Reads run folders, or folders that hold some, and writes the page; returns what is on it.

    Costs of runs that were made from objects need these: ``model``, ``data``, ``method``, ``task``, as for ``analyze``.
    """
    target = Path(out).expanduser()
    if target.is_dir():
        raise RunError(f"{out}: is a folder, expected a file such as {target / 'report.html'}")
    if target.is_file() and not target.read_bytes()[:64].lower().lstrip().startswith(b"<!doctype html"):
        raise RunError(f"{out}: holds something else than a page; choose another name, such as report.html")
    groups = read_groups(folders, **objects)
    atomic_write(target, make_page(groups, title).encode())
    return groups


def make_page(groups: Groups, title: str | None = None) -> str:
    """Returns the page about some runs."""
    with needs_extra("report", "report"):
        from jinja2 import Environment, StrictUndefined
        from plotly.offline import get_plotlyjs
    template, css, script = (
        Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    figures = {section: of_section(section, groups) for section in CURVES}
    figures |= {"levels": by_level(groups), "cohorts": [cohorts(groups)]}
    keys = ("model.name", "data.name", "data.partition", "data.clients")
    known = [facts for run in groups.runs if (facts := run.json("environment.json")).get("commit")]
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return jinja.from_string(template).render(
        groups=groups,
        title=title,
        made=f"incofl {incofl.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        commits=dict.fromkeys(str(e["commit"])[:10] + " with changes" * bool(e.get("modified")) for e in known),
        setups=list(dict.fromkeys(tuple(run.values.get(key) for key in keys) for run in groups.runs)),
        figures={section: list(map(asdict, found)) for section, found in figures.items()},
        pictures=pictures(groups),
        verdict=tables.verdict(groups),
        advice=tables.advice(groups),
        results=tables.results(groups),
        similarity=tables.similarity(groups),
        sizes=tables.sizes(groups),
        rejected=tables.rejected(groups),
        nodes=tables.nodes(groups),
        configs=tables.configs(groups),
        environments=tables.environments(groups),
        css=css,
        script=script,
        # The only text in it that would end the script element early stands in strings, where this means the same.
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
    )


def pictures(groups: Groups) -> dict[str, dict[str, str]]:
    """Reads the pictures that ``incofl analyze`` drew, of all runs together and of the first seed of each group."""
    folders = {"All runs": default_out(groups.runs)} if len(groups.runs) > 1 else {}
    for group in groups:
        one = f" (one of {len(group.runs)} seeds)" if group.several else ""
        folders[group.label + one] = group.runs[0].path / "analysis"
    return {
        name: {path.stem: base64.b64encode(path.read_bytes()).decode() for path in folder.glob("*.png")}
        for name, folder in folders.items()
    }
