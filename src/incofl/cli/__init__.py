"""The command line. Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted with all rounds saved.

Commands import what they need when they are called, so that help and lists answer at once.
"""

import sys
from typing import Annotated

import typer
from click import ClickException

import incofl
from incofl.cli.advise import advise
from incofl.cli.analyze import analyze
from incofl.cli.arguments import show_help
from incofl.cli.compare import compare
from incofl.cli.data import data_app
from incofl.cli.export import export, export_adapter
from incofl.cli.flower import flower_app
from incofl.cli.list import list_
from incofl.cli.plan import plan
from incofl.cli.report import report
from incofl.cli.reproduce import reproduce
from incofl.cli.run import run
from incofl.cli.watch import watch
from incofl.errors import IncoflError

typer.core.HAS_RICH = False  # else brackets in help texts are escaped for rich even where its markup is off
app = typer.Typer(
    help="Federated learning with clients of unequal size. Start with: incofl run demo",
    suggest_commands=False,  # click does it
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (run, advise, watch, compare, plan, analyze, report, export, reproduce):
    app.command()(command)
app.command("list")(list_)
app.command("export-adapter")(export_adapter)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"incofl {incofl.__version__}")
    else:
        show_help(context)


def main() -> None:
    """Runs the command line; what the user can fix is said in one line, without a traceback."""
    if sys.platform == "win32":
        typer.echo(
            "incofl: Windows is not supported (file locks and worker processes are those of Unix); use WSL", err=True
        )
        sys.exit(2)
    if sys.platform == "darwin":
        typer.echo("incofl: macOS is not tested: please report what does not work", err=True)
    try:
        code = app(standalone_mode=False)
    except (IncoflError, ClickException, OSError) as problem:
        code, message = 2, problem.format_message() if isinstance(problem, ClickException) else str(problem)
        if isinstance(problem, OSError):  # an unreadable file, a full disk
            message = f"{problem.filename or 'input or output'}: {problem.strerror or problem}"
        message = message.replace("a valid integer range", "a whole number")  # click's word
        typer.echo(f"incofl: {' '.join(message.split())}", err=True)  # libraries write several lines
    except MemoryError as problem:
        code = 2
        typer.echo(f"incofl: out of memory ({str(problem) or 'no more is known'}); choose smaller values", err=True)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
