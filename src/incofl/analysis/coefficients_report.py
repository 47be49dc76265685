"""What ``incofl analyze`` writes about InCo's coefficients."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from incofl.analysis.coefficients import Coefficients, coefficients, norm_of_change, of_layer, summary, unsteadiness
from incofl.analysis.coefficients_plots import draw_run, draw_runs
from incofl.analysis.findings import Findings, own_folder
from incofl.analysis.groups import by_seed
from incofl.analysis.runs import Run
from incofl.engine.checkpoint import write_json
from incofl.errors import RunError

HEADINGS = ("run", "adds", "layers", "theta", "beta > 0", "beta > 0 in rounds", "norm", "relative", "unsteadiness")


def figures(runs: Sequence[Run], out: Path) -> Findings:
    """Theta, beta and the size of the change of each run with InCo or noise, and such runs beside each other."""
    found: dict[Path, Coefficients] = {}
    files: list[Path] = []
    for run in runs:
        one = coefficients(run)
        if one is None:
            continue
        found[run.folder.path] = one
        folder = own_folder(run)
        files += [folder / "coefficients.json", folder / "coefficients.png"]
        write_json(files[-2], summary(one))
        if one.kind == "inco":
            draw_run(files[-1], one, _stages(run, one), run.name)
        else:
            draw_runs(files[-1], {run.name: one})
    if not found:
        raise RunError(f"coefficients: {runs[0].folder.path} and the others are runs without InCo and without noise")
    analysed = [run for run in runs if run.folder.path in found]
    if len(groups := by_seed(analysed)) > 1:
        files.append(out / "coefficients.png")
        draw_runs(files[-1], {label: found[group[0].folder.path] for label, group in groups.items()})
    title = "what is added to the updates of deep layers: means over layers and rounds"
    return Findings(title, [HEADINGS, *(_cells(run, found[run.folder.path]) for run in analysed)], files)


def _stages(run: Run, found: Coefficients) -> dict[str, int]:
    """The stage of each layer; a model of one stage is divided by blocks."""
    layout = run.layout
    parts = layout.stages if len(layout.stages) > 1 else tuple((block,) for block in layout.blocks)
    place = {block: number for number, part in enumerate(parts) for block in part}
    return {name: place.get(layout.block_of[name.partition(",")[0]] or "", 0) for name in found.layers}


def _cells(run: Run, found: Coefficients) -> list[str]:
    layers, norms = [of_layer(layer) for layer in found.layers.values()], norm_of_change(found)

    def mean(values: Sequence[float | None], form: str) -> str:
        known = [value for value in values if value is not None]
        return format(float(np.mean(known)), form) if known else "-"

    return [
        run.name,
        "noise" if found.kind == "noise" else "InCo" if found.optimise else "InCo without optimisation",
        str(len(layers)),
        mean([layer.theta for layer in layers], ".3f"),
        mean([layer.beta_positive for layer in layers], ".1%"),
        mean([layer.rounds_positive for layer in layers], ".1%"),
        mean(list(norms.values()), ".3g"),
        mean([layer.relative_change for layer in layers], ".3f"),
        mean([unsteadiness(norms)], ".3f"),
    ]
