"""How far the norms of honest clients are from the running median of their level: why ``validation.multiple`` is 10.

usage: python experiments/honest_norms.py [CONFIG] [key=value ...]

Prints, for each part of an upload and for the step of a round, the largest ratio of a run without attackers.
"""

import sys
import tempfile
from pathlib import Path

import incofl
from incofl.client import Upload
from incofl.config import make_config
from incofl.engine import validation
from incofl.server import Server


class Measured(validation.Validation):
    """Notes how close to the bound each upload comes."""

    largest: dict[str, float] = {}  # noqa: RUF012 (of all rounds)

    def _bound(self, part: str, upload: Upload, norm: float) -> float | None:
        usual, steps = self._usual(part, upload), self._usual("steps", upload)
        first = " before there is a median" if f"{part} {upload.level}" not in self._known else ""
        if usual:
            self._note(part + first, norm / (usual * max(1.0, upload.steps / steps if steps else 1.0)))
        return super()._bound(part, upload, norm)

    def problem(self, after: Server, accepted: int) -> str | None:
        found = super().problem(after, accepted)
        if usual := self._median("step"):
            self._note("step", self._new["step"][0] / usual)
        return found

    def _note(self, what: str, ratio: float) -> None:
        self.largest[what] = max(self.largest.get(what, 0.0), ratio)


def main() -> None:
    import incofl.engine.round as rounds

    rounds.Validation = Measured  # type: ignore[attr-defined]  # in its place for this process
    named, overrides = [a for a in sys.argv[1:] if "=" not in a], [a for a in sys.argv[1:] if "=" in a]
    config = make_config(named[0] if named else None, overrides)
    with tempfile.TemporaryDirectory() as folder:
        result = incofl.run(config, Path(folder) / "run", progress=False)
    for what, ratio in sorted(Measured.largest.items()):
        print(f"{what}: {ratio:.2f} times")
    touched = sum(len(row["rejected"]) + len(row.get("clipped", ())) for row in result.history)
    print(f"{len(result.history)} rounds, accuracy {result['accuracy']:.3f}, {touched} uploads rejected or clipped")


if __name__ == "__main__":
    main()
