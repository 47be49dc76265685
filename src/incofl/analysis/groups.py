"""Runs that differ in nothing but their seed belong together: figures show their mean."""

import itertools
import json
import re
from collections.abc import Sequence

from incofl.analysis.runs import Run
from incofl.config import UNBOUND


def by_seed(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs in groups of one config but for the seed, by a label that tells the groups apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.config.flat().items() if key != "seed" and key not in UNBOUND}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(run)
    found = list(groups.values())
    methods = [group[0].config.method for group in found]
    labels = methods if len(set(methods)) == len(found) else [_label([run.name for run in group]) for group in found]
    if len(set(labels)) < len(found):
        labels = [_label([str(run.folder.path) for run in group]) for group in found]
    if len(set(labels)) < len(found):
        labels = [f"{label} ({place})" for place, label in enumerate(labels, start=1)]
    return dict(zip(labels, found, strict=True))


def _label(names: Sequence[str]) -> str:
    """What the names of a group have in common, without what is left of the word for the seed."""
    if len(names) == 1:
        return names[0]
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return re.sub(r"[-_ ./]*(s|seed)?[-_ ./]*$", "", "".join(letters[0] for letters in same)) or names[0]
