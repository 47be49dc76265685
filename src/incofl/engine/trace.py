"""A timeline of a run: which process did what when, in the Trace Event Format that Perfetto and Chrome show.

See docs/speed.md for how to read it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

SERVER = "server"


@dataclass
class Trace:
    """Collects spans while it is ``on``."""

    on: bool = False
    # What, who, start and end; times are of perf_counter, which the processes of a machine share.
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    def add(self, what: str, who: str, start: float, end: float) -> None:
        """Records something that has ended."""
        if self.on:
            self.spans.append((what, who, start, end))

    @contextmanager
    def span(self, what: str, who: str = SERVER) -> Iterator[None]:
        """Records what happens inside."""
        start = perf_counter()
        yield
        self.add(what, who, start, perf_counter())

    def save(self, path: Path) -> None:
        """Writes all spans; times are in microseconds since the first."""
        zero = min((start for _, _, start, _ in self.spans), default=0.0)
        tracks = {who: number for number, who in enumerate(sorted({who for _, who, _, _ in self.spans}))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": who}}
            for who, number in tracks.items()
        ]
        for what, who, start, end in self.spans:
            times = {"ts": round(1e6 * (start - zero), 1), "dur": round(1e6 * (end - start), 1)}
            events.append({"ph": "X", "name": what, "pid": 0, "tid": tracks[who], **times})
        path.write_text(json.dumps({"traceEvents": events}) + "\n")
