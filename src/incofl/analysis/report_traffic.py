"""The report's figures of what rounds cost: bytes, what they bought, and seconds."""

from collections.abc import Sequence
from itertools import accumulate

from incofl.analysis.report_figures import (
    BYTES,
    PERCENT,
    Figure,
    Panel,
    Trace,
    curves,
    endings,
    in_bytes,
    line,
    mean_accuracy,
    number,
    over_rounds,
    percent,
    point_limit,
    thin,
    thinned,
)
from incofl.analysis.report_runs import Group, Points, ReportedRun, Value


def communication(groups: Sequence[Group]) -> list[Figure]:
    """Bytes per round, in total, what they bought, and seconds."""
    each = curves(groups, lambda run: lambda row: row["bytes_up"] + row["bytes_down"])
    sums = curves(groups, _so_far)
    against = [trace for group in groups for trace in _against_bytes(group, point_limit(groups))]
    seconds = curves(groups, lambda run: lambda row: row["seconds"])
    up_and_down = "Down to the clients and up to the server, over the whole cohort, uncompressed."
    return [
        Figure(
            "bytes",
            "Communication per round",
            up_and_down,
            f"Curves of the bytes per round. {endings(each, in_bytes)}",
            [Panel(each, over_rounds("per round", **BYTES, rangemode="tozero"))],
            "bytes",
        ),
        Figure(
            "bytes-total",
            "Communication in total",
            "The sum over the rounds so far.",
            f"Curves of the bytes in total over the rounds. {endings(sums, in_bytes)}",
            [Panel(sums, over_rounds("in total", **BYTES, rangemode="tozero"))],
            "bytes",
        ),
        Figure(
            "accuracy-bytes",
            "Accuracy against communication",
            "What the bytes so far have bought: further left and higher is better.",
            f"Curves of the test accuracy against the bytes in total. {endings(against, percent)}",
            [
                Panel(
                    against,
                    {
                        "hovermode": "closest",
                        "xaxis": {"title": {"text": "bytes in total"}, **BYTES, "rangemode": "tozero"},
                        "yaxis": {"title": {"text": "test accuracy"}, **PERCENT},
                    },
                )
            ],
            "percent",
            table="long",
        ),
        Figure(
            "seconds",
            "Time per round",
            "Training, aggregation and evaluation, as the clock of that machine saw them; runs on other machines, or "
            "beside other work, cannot be compared.",
            f"Curves of the seconds per round. {endings(seconds, number)}",
            [Panel(seconds, over_rounds("seconds", rangemode="tozero", hoverformat=".3~g"))],
        ),
    ]


def _so_far(run: ReportedRun) -> Value:
    """Bytes up to each round."""
    sums = accumulate(row["bytes_up"] + row["bytes_down"] for row in run.rows)
    total = {row["round"]: total for row, total in zip(run.rows, sums, strict=True)}
    return lambda row: total[row["round"]]


def _against_bytes(group: Group, limit: int) -> list[Trace]:
    """Accuracy at the bytes that it took; of several seeds the mean of both, after the same round."""

    def points(bytes_: Points, accuracy: Points) -> tuple[list[float], list[float]]:
        taken = dict(zip(*bytes_, strict=True))
        return thinned(([taken[x] for x in accuracy[0]], accuracy[1]), limit)

    several, traces = len(group.runs) > 1, []
    for run in group.runs if several else ():
        of_run = points(run.points(_so_far(run)), run.points(mean_accuracy))
        traces.append(thin(group, run, of_run))
    name = f"{group.label}, mean of {len(group.runs)}" if several else group.label
    mean = points(group.mean(_so_far), group.mean(lambda run: mean_accuracy))
    trace = line(name, mean, group.index, meta={"group": group.index})
    trace["hovertemplate"] = f"{name}<br>%{{y:.1%}} after %{{x:.3s}}B<extra></extra>"
    return [trace for trace in [*traces, trace] if trace["x"]]
