"""How long a user waits: from the start of ``incofl run demo`` to its first trained client.

usage: python benchmarks/start.py [--repeats 7]

Each measurement is a process of its own, which imports what the command imports and stops at the first upload: once
with the workers that the demo chooses, once without. Beside it a process that only imports torch, in turn: that is most
of it. Seconds on the clock are what a user waits for, if the machine is idle; those of the processor, user and system
of all processes together, can be compared on a busy one, too.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time

TARGET = 3.0  # seconds on the clock, on an idle machine


def first_client(begun: float, *settings: str) -> float:
    """Runs the demo until its first upload."""
    from incofl.cli import main
    from incofl.cli.display import RunDisplay

    seconds: list[float] = []

    def stop(display: RunDisplay, client: int) -> None:
        seconds.append(time.time() - begun)
        raise KeyboardInterrupt  # the run ends its workers

    RunDisplay.uploaded = stop  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        sys.argv = ["incofl", "run", "demo", "--quiet", *settings, "--out", f"{folder}/run"]
        main()
    return seconds[0]


def import_torch(begun: float) -> float:
    """Imports torch and nothing else."""
    __import__("torch")
    return time.time() - begun


WAYS = {
    "incofl run demo": first_client,
    "the same in one process": lambda begun: first_client(begun, "--set", "engine.workers=1"),
    "import torch": import_torch,
}


def in_fresh_process(way: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--begun", repr(time.time())]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        clock = WAYS[options.way](options.begun)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(json.dumps({"clock": clock, "processor": sum(usage.ru_utime + usage.ru_stime for usage in used)}))
        return
    from measure import publish, spread, table

    measured = [{way: in_fresh_process(way) for way in WAYS} for _ in range(options.repeats)]
    rows = [[way, *(spread([m[way][key] for m in measured]) for key in ("clock", "processor"))] for way in WAYS]
    text = table(["until", "seconds on the clock", "seconds of the processor"], rows)
    text += f"\nTarget: the first trained client in at most {TARGET:g} s on the clock of an idle machine.\n"
    publish("start", text, {"measured": measured})


if __name__ == "__main__":
    main()
