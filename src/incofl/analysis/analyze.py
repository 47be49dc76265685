"""All analyses of some runs, as ``incofl analyze`` makes them."""

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from incofl.analysis import coefficients_report, features, similarity_report, updates_report
from incofl.analysis.findings import Analysis, Findings, Options
from incofl.analysis.runs import Run
from incofl.errors import ConfigError, IncoflError, RunError, nearest

NAMES = ("similarity", "features", "updates", "environments", "coefficients")


def analyses(options: Options) -> dict[str, Analysis]:
    """The table of analyses, in their order."""
    return {
        "similarity": functools.partial(similarity_report.figures, options=options),
        "features": functools.partial(features.figures, options=options),
        "updates": updates_report.figures,
        "environments": updates_report.cross_environment,
        "coefficients": coefficients_report.figures,
    }


def check_names(names: Sequence[str]) -> None:
    """Refuses an analysis that there is not, and none at all."""
    for name in names or [""]:
        if name not in NAMES:
            raise ConfigError(f"--only: got {name!r}{nearest(name, NAMES)}")


def analyze(
    runs: Sequence[Run], out: Path, options: Options | None = None, only: Sequence[str] = NAMES
) -> Iterator[Findings]:
    """Makes one analysis after the other, and yields what it found; one that can do nothing says why.

    Raises:
        RunError: if none could do anything.
    """
    check_names(only)
    done, problems = 0, []
    for name, figures in analyses(options or Options()).items():
        if name not in only:
            continue
        try:
            findings = figures(runs, out)
        except IncoflError as problem:
            problems.append(problem)
            findings = Findings(missing=[str(problem)])
        done += bool(findings.files)
        yield findings
    if not done:
        raise problems[0] if problems else RunError("nothing could be analysed")


def default_out(runs: Sequence[Run]) -> Path:
    """Where comparisons go: beside the runs; of a single run, into its own folder."""
    folders = [run.folder.path for run in runs]
    if len(folders) == 1:
        return folders[0] / "analysis"
    return Path(os.path.commonpath([folder.absolute().parent for folder in folders])) / "analysis"
