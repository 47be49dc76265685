"""One self-contained page about one or more runs: ``incofl report``."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path

import incofl
from incofl.analysis import report_figures as figures
from incofl.analysis import report_tables as tables
from incofl.analysis.report_fleet import cohorts, fleet, sizes
from incofl.analysis.report_layers import coefficients, similarity
from incofl.analysis.report_page import Section, page
from incofl.analysis.report_runs import Group, read_groups
from incofl.analysis.report_traffic import communication
from incofl.engine.checkpoint import atomic_write


def write_report(paths: Sequence[Path], out: Path, title: str | None = None) -> list[Group]:
    """Reads run folders, or folders that hold some, and writes the page; returns what is on it."""
    groups = read_groups(paths)
    text = make_page(groups, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as file:
        file.write(text.encode())
    return groups


def make_page(groups: Sequence[Group], title: str | None = None) -> str:
    """The page about some runs."""
    runs = [run for group in groups for run in group.runs]
    lead = tables.tiles(runs[0]) if len(runs) == 1 else ""
    legend = [(group.index, group.label) for group in groups]
    return page(title or _title(groups), _provenance(groups), lead, legend, _sections(groups))


def _sections(groups: Sequence[Group]) -> list[Section]:
    layers, nodes = similarity(groups), fleet(groups)
    sections = [
        Section("results", "Results", before=f"<p>{_how(groups)}</p>{tables.results(groups)}"),
        Section("curves", "Over the rounds", [figures.accuracy(groups), figures.loss(groups)]),
        Section("by-level", "By level", figures.by_level(groups)),
        Section("layers", "Similarity of layers", layers, before="" if layers else NO_SIMILARITY),
    ]
    if mixed := coefficients(groups):
        sections.append(Section("inco", "InCo's coefficients", mixed))
    sections += [
        Section("communication", "Communication and time", communication(groups)),
        Section("sizes", "Sizes", sizes(groups), before=tables.sizes(groups)),
        Section("clients", "Clients", cohorts(groups), after=tables.rejected(groups)),
    ]
    if nodes:
        sections.append(Section("fleet", "The fleet", nodes, after=tables.nodes(groups)))
    return [
        *sections,
        Section("config", "Config", before=tables.configs(groups)),
        Section("environment", "Environment", before=tables.environments(groups)),
    ]


NO_SIMILARITY = """<p>How alike the layers of the client models are is not known yet: run
<code>incofl analyze RUN</code> to add it.</p>"""


def _title(groups: Sequence[Group]) -> str:
    data = list(dict.fromkeys(group.config.data.name for group in groups))
    names = [group.label for group in groups] if len(groups) <= 3 else [f"{len(groups)} configurations"]
    together = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{together} on {', '.join(data)}"


def _provenance(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    commits = list(dict.fromkeys(_commit(run.environment) for run in runs if run.environment.get("commit")))
    made = f"incofl {incofl.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    where = f"from <code>{escape(str(runs[0].path))}</code>" if len(runs) == 1 else f"from {len(runs)} run folders"
    return f"{made}, {where}" + (f"; computed at commit {escape(', '.join(commits))}" if commits else "")


def _commit(environment: dict[str, object]) -> str:
    return str(environment["commit"])[:10] + (" with changes" if environment.get("modified") else "")


def _how(groups: Sequence[Group]) -> str:
    """What was run, in a sentence or two."""
    config = groups[0].config
    several = any(len(group.runs) > 1 for group in groups)
    same = (
        len({(g.config.model.name, g.config.data.name, g.config.data.clients, g.config.cohort_size) for g in groups})
        == 1
    )
    what = (
        f"{config.model.name} at width {config.model.width:g}, {config.data.name}, {config.data.partition} partition, "
        f"{config.data.clients} clients, {config.cohort_size} a round. "
    )
    seeds = " Lines of several seeds: mean ± half width of the 95 % interval." if several else ""
    return escape((what if same else "") + "Test accuracy in percent; by level over the last ten rounds." + seeds)
