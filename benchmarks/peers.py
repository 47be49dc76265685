"""The engine against others: Flower's simulation, Apple's pfl, and a new process for every client.

usage: python benchmarks/peers.py [--root DIR] [--rounds 3] [--repeats 3] [--clients 100] [--cohort 10] [--width 0.25]
                                  [--workers 2] [--only incofl,flower,pfl,process-per-client] [--examples N]
       python benchmarks/peers.py --small [--work 20x1,20x5,200x1,200x5] [--clients 100] [--cohort 10] [...]

Every engine plays the same rounds: the same cohorts, sub-models, batches and local steps, by the same code, in as many
processes of one torch thread each. What is compared is what an engine adds: starting, waiting, sending, averaging. DIR
holds CIFAR-10 in its binary format; without it the digits that come with scikit-learn are used, which are too few for
a claim. The peers are optional, tried with flwr 1.41.0, ray 2.55.1 and pfl 0.6.0; what is not installed is left out.
flwr and pfl ask for older versions of typer, rich and packaging than constraints.txt has, and work with these: install
the two with --no-deps and then what else they need.

With --small the clients are small ones: tiny-mlp on embedded digits, of some numbers of examples and epochs; in incofl
they train side by side (engine.vectorise), which in the other engines nobody can.

Each engine runs in a process of its own, in turn, and the ratio is taken within each turn. The first round loads data
and starts workers; it is not counted. A new process for every client has nothing to warm up: it starts from the server
that incofl has after the first round.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import measure
import torch
from peer_rounds import Engine, Played, play

from incofl.config import Config, load_config
from incofl.engine.backend import make_executor
from incofl.engine.build import build
from incofl.engine.federation import Federation
from incofl.server import Server
from incofl.tensors import Tensors

# Engine: the packages that it needs, and how many times as fast incofl should be.
ENGINES = {
    "incofl": (("incofl",), 1.0),
    "flower": (("flwr", "ray"), 1.5),
    "pfl": (("pfl",), 1.0),
    "process-per-client": ((), 3.0),
}

# No engine may look for updates or report its use while it is measured.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="the folder of CIFAR-10; left out: the digits of scikit-learn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default=",".join(ENGINES), help="engines to run, separated by commas")
    parser.add_argument("--examples", type=int, help="use only so many training examples")
    parser.add_argument("--small", action="store_true", help="many clients with little to do")
    parser.add_argument("--work", default="20x1", help="with --small, examples x epochs, several separated by commas")
    # For the processes that this program starts:
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - ENGINES.keys():
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(ENGINES)}")
    if not 2 <= arguments.workers <= arguments.cohort:
        parser.error(f"--workers: got {arguments.workers}, expected 2 to the size of the cohort")
    if arguments.engine:
        run_engine(arguments)
    else:
        compare(arguments)


def make_config(arguments: argparse.Namespace) -> Config:
    """The paper's federation, narrower, or one of small clients."""
    if arguments.small:
        examples, _, epochs = arguments.work.partition("x")
        sizes = [f"{key}={getattr(arguments, name)}" for key, name in SIZES.items()]
        return load_config(None, [*SMALL, *sizes, f"data.examples={examples}", f"local.epochs={epochs}"])
    overrides = [
        "method=heteroavg",
        f"model.width={arguments.width}",
        f"data.clients={arguments.clients}",
        f"cohort={arguments.cohort}",
        f"engine.workers={arguments.workers}",
    ]
    overrides += [f"data.root={json.dumps(arguments.root)}"] if arguments.root else ["data.name=digits"]
    overrides += ["model.stem=small"] if not arguments.root else []  # digits are 8 x 8
    overrides += [f"data.limit={arguments.examples}"] if arguments.examples else []
    return load_config("paper-cifar10", overrides)


# The federation of small clients, and what of it arguments say.
SMALL = ["method=heteroavg", "model.name=tiny-mlp", "split.kind=layer", "data.partition=virtual"]
SMALL += ["local.batch_size=20", "engine.vectorise=true"]
SIZES = {"data.clients": "clients", "cohort": "cohort", "engine.workers": "workers"}


def run_engine(arguments: argparse.Namespace) -> None:
    """Plays the rounds with one engine, in this process, and saves the server after each with its time."""
    config = make_config(arguments)
    federation = build(config)
    federation.schedule(0, config.cohort_size)  # finds the costs of the levels, once: outside of every clock
    server, rounds = federation.start(), arguments.rounds + 1
    if arguments.start:
        server = Server(server.layout, torch.load(arguments.start)[0]["state"], round=1)
        rounds -= 1
    played = find_engine(arguments.engine)(config, federation, server, rounds)
    if os.environ.get("RANK", "0") == "0":  # all ranks of pfl have the same
        saved = [{"round": p.server.round, "state": p.server.shared, "seconds": p.seconds} for p in played]
        torch.save(saved, arguments.out)
    if torch.distributed.is_initialized():  # pfl leaves it to the end of the process, whose threads it may abort
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def find_engine(name: str) -> Engine:
    """An engine by its name; only its own framework is imported."""
    if name == "incofl":
        return run_incofl
    module = {"flower": "peer_flower", "pfl": "peer_pfl", "process-per-client": "peer_processes"}[name]
    engine: Engine = importlib.import_module(module).run
    return engine


def run_incofl(config: Config, federation: Federation, server: Server, rounds: int) -> list[Played]:
    """Plays the rounds as ``incofl run`` does."""
    executor = make_executor(config, federation, rounds)
    try:
        return play(config, federation, server, rounds, executor)
    finally:
        executor.close()


Seconds = dict[str, list[list[float]]]  # by engine, of each counted round in each repeat
Differences = dict[str, list[float]]  # by engine, the largest from incofl after each round


def compare(arguments: argparse.Namespace) -> None:
    """Lets the engines play in turn, and publishes the ratios."""
    versions = {name: find_version(packages) for name, (packages, _) in ENGINES.items()}
    chosen = [name for name in ENGINES if name in ("incofl", *arguments.only.split(","))]  # incofl is the measure
    present = [name for name in chosen if versions[name] is not None]
    works = arguments.work.split(",") if arguments.small else [""]
    measured = {work: compare_one(arguments, present, work) for work in works}
    publish(arguments, chosen, versions, measured)


def compare_one(arguments: argparse.Namespace, present: list[str], work: str) -> tuple[Seconds, Differences]:
    """Lets the engines play rounds of clients with some work in turn."""
    seconds: Seconds = {name: [] for name in present}
    differences: Differences = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            played = {}
            for name in present:
                played[name] = start_engine(name, arguments.workers, work, Path(folder))
                # The last rounds are the counted ones, whether or not the engine was warmed up.
                seconds[name].append([p["seconds"] for p in played[name]][-arguments.rounds :])
                total = sum(seconds[name][-1])
                print(f"{work} repeat {repeat + 1}, {name}: {arguments.rounds} round(s) in {total:.1f} s", flush=True)
            # Results do not depend on the repeat.
            differences = {name: difference(played["incofl"], played[name]) for name in present}
    return seconds, differences


def find_version(packages: tuple[str, ...]) -> str | None:
    """The versions of an engine's packages; ``None`` if one is missing."""
    try:
        return ", ".join(f"{package} {version(package)}" for package in packages) or "-"
    except PackageNotFoundError:
        return None


def start_engine(name: str, workers: int, work: str, folder: Path) -> list[dict[str, Any]]:
    """Runs this program again for one engine, and reads the rounds that it saved."""
    out = folder / f"{name}.pt"
    out.unlink(missing_ok=True)
    launcher = [sys.executable]
    if name == "pfl":  # its workers are ranks of torch.distributed
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command = [*launcher, __file__, *sys.argv[1:], "--engine", name, "--out", str(out)]
    command += ["--work", work] if work else []
    if name == "process-per-client":
        command += ["--start", str(folder / "incofl.pt")]
    environment = os.environ | QUIET | {"FLWR_HOME": str(folder / "flwr")}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode or not out.exists():
        raise SystemExit(f"{answer.stdout[-4000:]}{answer.stderr[-8000:]}\n{name}: failed, see above")
    rounds: list[dict[str, Any]] = torch.load(out)
    return rounds


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    """After each round that both played, the largest difference of any element of the server model.

    Where floats are summed in another order the first round shows rounding only; training then makes it grow.
    """
    states: dict[int, Tensors] = {entry["round"]: entry["state"] for entry in ours}
    return [
        max(
            float((states[entry["round"]][name] - value).abs().max())
            for name, value in entry["state"].items()
            if value.is_floating_point()
        )
        for entry in theirs
    ]


def publish(
    arguments: argparse.Namespace,
    chosen: list[str],
    versions: dict[str, str | None],
    measured: dict[str, tuple[Seconds, Differences]],
) -> None:
    """Writes the table, and every measurement."""
    rows, engines = [], dict[str, dict[str, Any]]()
    for work, (seconds, differences) in measured.items():
        first = [work.replace("x", " examples, ") + " epoch(s)"] if work else []
        engines[work] = {}
        for name in chosen:
            if name not in seconds:
                rows.append([*first, name, "not installed", "-", "-", "-"])
                continue
            per_minute = [60 * arguments.rounds / sum(turn) for turn in seconds[name]]
            ratios = [sum(turn) / sum(ours) for ours, turn in zip(seconds["incofl"], seconds[name], strict=True)]
            least = ENGINES[name][1] if not work else {"20x1": 5.0}.get(work)
            rows.append(
                [
                    *first,
                    name,
                    str(versions[name]),
                    f"{statistics.median(per_minute):.2f}",
                    "1" if name == "incofl" else measure.spread(ratios),
                    "-" if name == "incofl" or least is None else f"at least {least:g}",
                ]
            )
            engines[work][name] = {
                "version": versions[name],
                "seconds": seconds[name],
                "rounds_per_minute": per_minute,
                "incofl_times_as_fast": ratios,
                "difference_by_round": differences[name],
            }
    data = "CIFAR-10" if arguments.root else "the digits of scikit-learn, too few for a claim"
    limit = f", {arguments.examples} training examples" if arguments.examples else ""
    model = f"ResNet10 to ResNet26 at width {arguments.width:g}"
    if arguments.small:
        data, limit, model = "embedded digits", "", "five sizes of tiny-mlp"
    text = (
        f"The same rounds in each engine: {data}{limit}; {arguments.clients} clients, {arguments.cohort} in a round, "
        f"{model}, {arguments.workers} processes of one thread.\n\n"
    )
    columns = ["engine", "version", "rounds per minute (median)", "incofl is x times as fast", "target"]
    text += measure.table([*(["work of a client"] if arguments.small else []), *columns], rows)
    text += "\nLargest difference of the server model from incofl's after the first and the last common round: "
    told = [(work, name, d) for work, (_, found) in measured.items() for name, d in found.items()]
    text += "; ".join(f"{work} {name} {d[0]:.1g}, {d[-1]:.1g}".strip() for work, name, d in told) + ".\n"
    settings = {key: value for key, value in vars(arguments).items() if key not in ("root", "engine", "start", "out")}
    data = "cifar10" if arguments.root else "digits"
    found = {"work": engines} if arguments.small else {"engines": engines[""]}
    measure.publish("peers-small" if arguments.small else "peers", text, {"data": data, "settings": settings, **found})


if __name__ == "__main__":
    main()
