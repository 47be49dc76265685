"""The command ``incofl watch``."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from incofl.errors import RunError


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, going on or finished.")],
    serve: Annotated[bool, typer.Option("--serve", help="Show it as a page on this machine instead.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any that is free.")] = 8765,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and end.")] = False,
) -> None:
    """Follow a run: how far it is, the metric of each level, what was rejected.

    It reads the run folder only, so it can be started and left at any time, also on a folder that is mounted from
    another machine. It ends with the run; the page (http://127.0.0.1:8765) ends with Ctrl-C.
    """
    from rich.live import Live

    from incofl.cli.display import make_console
    from incofl.report.live import finished, make_server, state

    if serve:
        with make_server(run, port) as server:
            typer.echo(f"http://127.0.0.1:{server.server_address[1]}/ follows {run}; Ctrl-C ends it")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return
    console, now = make_console(), state(run)
    if once or finished(now) or not console.is_terminal:
        console.print(view(now, console.options.ascii_only))
        return
    try:
        with Live(view(now), console=console, auto_refresh=False) as live:
            while not finished(now):
                time.sleep(1)
                try:
                    now = state(run)
                except (OSError, ValueError) as problem:
                    raise RunError(f"{run}: cannot be read any more ({problem})") from None
                live.update(view(now), refresh=True)
    except KeyboardInterrupt:
        return


def view(now: dict[str, Any], ascii_only: bool = False) -> Any:
    """What the terminal shows of a run."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    from incofl.cli.display import sparkline
    from incofl.costs import human

    evaluations = now["evaluations"]
    highest = max([1.0, *(value for row in evaluations for value in row["accuracy_by_level"] if value is not None)])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("level", now["metric"], "rounds"):
        table.add_column(heading, justify="right" if heading == now["metric"] else "left")
    rows = [
        (str(level), [row["accuracy_by_level"][place] for row in evaluations])
        for place, level in enumerate(now["levels"])
    ]
    for name, values in [*rows, ("mean", [row["accuracy"] for row in evaluations])]:
        last = "-" if not values or values[-1] is None else f"{values[-1]:.3f}"
        table.add_row(name, last, sparkline(values[:: max(1, -(-len(values) // 32))], highest, ascii_only))
    pace = "" if now["left"] is None else f", last round {now['age']:.0f} s ago, about {now['left']:.0f} s left"
    status = now["status"] + pace if now["status"] == "no summary yet" else now["status"]
    lines = [
        f"{now['name']}: {now['method']} on {now['data']}, {now['model']}, seed {now['seed']}",
        f"round {now['done']} of {now['rounds']}: {status}",
        Padding(ProgressBar(now["rounds"], now["done"], width=60), 0) if not ascii_only else "",  # ends its line
        table,
        f"{human(now['bytes_down'], 'B')} down, {human(now['bytes_up'], 'B')} up, {now['seconds']:.0f} s of rounds",
        *(f"rejected, {line}" for line in now["rejected"]),
    ]
    return Group(*lines)
