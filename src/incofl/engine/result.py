"""What comes of a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from incofl.errors import needs_extra

if TYPE_CHECKING:
    from incofl.engine.run import Run


class Result(dict[str, Any]):
    """The result of a run: the keys and values of ``summary.json``.

    ``history`` has the rows of ``metrics.jsonl``, one for each round, and ``folder`` is the run folder.
    """

    def __init__(self, summary: Mapping[str, Any], run: "Run") -> None:
        super().__init__(summary)
        self.history, self.folder, self._run = run.rows, run.folder.path, run

    def model(self, level: int = -1, exit: int | None = None) -> nn.Module:
        """The trained module of a level, ready for evaluation; -1 is the largest. ``exit`` is as in ``load_model``."""
        return self._run.model(level, exit)

    def frame(self) -> Any:
        """The history as a pandas ``DataFrame``: a line for each round, a column for each number of each level.

        Numbers of levels and of transforms have names such as ``accuracy_by_level.0`` and ``inco.TENSOR.theta``.
        """
        with needs_extra("pandas", "frame"):
            import pandas
        numbers = self["levels"]
        rows = [{key: _by_level(value, numbers) for key, value in row.items()} for row in self.history]
        return pandas.json_normalize(rows).set_index("round")


def _by_level(value: Any, levels: Sequence[int]) -> Any:
    """A list with a value for each level as a mapping by level; in ``metrics`` there is one for each metric."""
    if isinstance(value, dict):
        return {key: _by_level(inner, levels) for key, inner in value.items()}
    numbers = isinstance(value, list) and len(value) == len(levels) and all(isinstance(x, float) for x in value)
    return dict(zip(levels, value, strict=True)) if numbers else value
