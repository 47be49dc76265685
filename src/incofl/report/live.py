"""A run as it is now, read from its folder, and a page on this machine that follows it."""

import json
import time
import tomllib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from incofl.config.schema import called
from incofl.engine.files import read_json
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, RunError

LOOPBACK = "127.0.0.1"  # nobody else can connect
LATEST = 5  # refusals that are shown
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def state(folder: str | Path) -> dict[str, Any]:
    """What a run folder says now: how far it is, the metric of each level in each evaluated round, what was refused.

    It takes no lock and changes nothing, so it can be called while the run goes on, also on a folder that is mounted.
    """
    run = RunFolder(Path(folder).expanduser())
    if not run.config.exists():
        raise RunError(f"{folder}: holds no run (no config.toml); is it a run folder?")
    config, rows = run.values(), run.rows()
    summary: dict[str, Any] = {}
    if run.summary.exists():
        hint = "delete it: the run writes it anew when it is resumed"
        summary = read_json(run.summary, hint)
        for key, kind in {"status": str, "rounds": int, "metric": str, "levels": list}.items():
            if not isinstance(value := summary.get(key), kind):
                raise RunError(f"{run.summary}: damaged ({key} is {value!r:.40}); {hint}")
        if not all(type(level) is int for level in summary["levels"]):
            raise RunError(f"{run.summary}: damaged (its levels are no numbers); {hint}")
    evaluated = [row for row in rows if row["accuracy"] is not None]
    counts, names = config.get("split.counts"), config.get("split.names")
    sizes = len(evaluated[-1]["accuracy_by_level"]) if evaluated else 0
    used = [level for level, count in enumerate(counts) if count] if isinstance(counts, list) else list(range(sizes))
    levels = summary.get("levels") or used
    left = config["rounds"] - len(rows)
    pace = sum(row["seconds"] for row in rows[-10:]) / max(1, len(rows[-10:]))
    closed = summary.get("rounds") == len(rows)
    return {
        "name": run.path.resolve().name,
        "method": config["method"],
        "data": config["data.name"],
        "model": config["model.name"],
        "seed": config["seed"],
        "rounds": config["rounds"],
        "done": len(rows),
        "status": "done" if left <= 0 else summary["status"] if closed else "no summary yet",
        "age": round(time.time() - run.metrics.stat().st_mtime, 1) if rows else None,  # seconds since the last round
        "left": round(left * pace, 1) if rows else None,  # seconds at the pace of the last rounds
        "metric": summary.get("metric", "accuracy"),
        "levels": [called(names, level) if isinstance(names, list) else level for level in levels],
        "evaluations": [{key: row[key] for key in ("round", "accuracy", "accuracy_by_level")} for row in evaluated],
        "loss": [[row["round"], row["loss"]] for row in rows if row["loss"] is not None],
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "rejected": [f"round {row['round']}: {each['reason']}" for row in rows for each in row["rejected"]][-LATEST:],
    }


def finished(now: dict[str, Any]) -> bool:
    """Whether nothing more will come."""
    return bool(now["status"] != "no summary yet")


def make_server(folder: str | Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page and of what it asks for, on the loopback address; port 0 is any that is free."""
    state(folder)  # refuses what is no run
    try:
        return ThreadingHTTPServer((LOOPBACK, port), partial(_Handler, Path(folder)))
    except OSError as problem:
        raise ConfigError(f"--port: got {port}, which cannot be used ({problem.strerror}); try --port 0") from None


class _Handler(BaseHTTPRequestHandler):
    """Answers two paths, to nobody but this machine's own name: a foreign page must not read a run through it."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self._folder = folder
        super().__init__(*arguments)

    def do_GET(self) -> None:
        server: Any = self.server
        own = {f"{name}:{server.server_port}" for name in (LOOPBACK, "localhost")}
        if self.headers.get("Host") not in own:
            self.send_error(403)
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", (resources.files("incofl.report") / "live.html").read_bytes())
        elif self.path == "/state.json":
            try:
                now = json.dumps(state(self._folder))
            except (RunError, OSError, ValueError, tomllib.TOMLDecodeError) as problem:  # the folder has gone
                self.send_error(503, str(problem).partition("\n")[0][:200].encode("ascii", "replace").decode())
                return
            self._answer("application/json", now.encode())
        else:
            self.send_error(404)

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for key, value in (headers | {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: a line every two seconds helps nobody."""
