"""The live view of a run: what is read from its folder, the terminal, and the page in a real browser."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import incofl as library
from incofl.errors import ConfigError, RunError
from incofl.report.live import finished, make_server, state
from tests.browser import CHROMIUM, Browser
from tests.federations import tiny_config
from tests.shell import Shell

SMALL = ("model.name=tiny-mlp", "data.limit=150", "eval.every=2", "rounds=4")


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    with make_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def test_a_run_is_followed_while_it_goes_on(tmp_path: Path, incofl: Shell) -> None:
    seen = []
    with library.Run(tiny_config(*SMALL), tmp_path / "run", progress=False) as run:
        seen.append(state(tmp_path / "run"))
        for row in run:
            seen.append(now := state(tmp_path / "run"))
            assert now["loss"][-1] == [row["round"], row["loss"]]
    assert [now["done"] for now in seen] == [0, 1, 2, 3, 4]
    assert [finished(now) for now in seen] == [False, False, False, False, True]
    assert [len(now["evaluations"]) for now in seen] == [0, 0, 1, 1, 2]
    assert seen[2]["evaluations"][0]["accuracy_by_level"] == run.rows[1]["accuracy_by_level"]
    assert seen[1]["left"] == pytest.approx(3 * run.rows[0]["seconds"], abs=0.1)
    code, out, err = incofl("watch", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "run: incoavg on digits, tiny-mlp, seed 0" in out
    assert "round 4 of 4: done" in out
    assert "level" in [line.split()[0] for line in out.splitlines() if line]  # a line of its own, after the bar
    assert [line.split()[:2] for line in out.splitlines() if line[:1].isdigit()][:3] == [
        [str(level), f"{value:.3f}"] for level, value in enumerate(run.rows[-1]["accuracy_by_level"])
    ]
    code, _, err = incofl("watch", tmp_path)
    assert (code, err) == (2, f"incofl: {tmp_path}: holds no run (no config.toml); is it a run folder?\n")


def test_an_interrupted_run_is_said_to_be_so(tmp_path: Path) -> None:
    for row in library.Run(tiny_config(*SMALL), tmp_path, progress=False):
        if row["round"] == 2:
            break
    assert state(tmp_path)["status"] == "interrupted"


def test_the_page_is_for_this_machine_alone(tmp_path: Path) -> None:
    library.run(tiny_config(*SMALL), tmp_path, progress=False)
    with serving(tmp_path) as port:

        def ask(path: str, host: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert json.loads(ask("/state.json", f"127.0.0.1:{port}")[1])["done"] == 4
        assert ask("/", f"localhost:{port}")[0] == 200
        assert ask("/state.json", f"evil.example:{port}")[0] == 403
        assert ask("/config.toml", f"127.0.0.1:{port}")[0] == 404
        with pytest.raises(ConfigError, match=rf"--port: got {port}, which cannot be used"):
            make_server(tmp_path, port)
    with pytest.raises(RunError, match="holds no run"):
        make_server(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_follows_a_run(tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        with library.Run(tiny_config(*SMALL), tmp_path / "<b>run", progress=False) as run:
            rounds = iter(run)
            next(rounds)
            with serving(tmp_path / "<b>run") as port:
                browser.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
                browser.wait("document.getElementById('far')?.textContent === 'round 1 of 4'")
                assert browser.evaluate("document.querySelector('h1').textContent") == "<b>run"
                assert browser.evaluate("document.querySelectorAll('#levels tr').length") == 0
                list(rounds)
                run.close()
                browser.wait("document.getElementById('status').textContent === 'done'")
                shown = browser.evaluate(
                    "[...document.querySelectorAll('#levels td:nth-child(2)')].map(x => x.textContent)"
                )
                assert shown == [f"{value:.3f}" for value in run.rows[-1]["accuracy_by_level"]]
                points = browser.evaluate("document.querySelector('#curve polyline').getAttribute('points')")
                assert [point.split(",")[0] for point in points.split()] == ["500.0", "1000.0"]  # rounds 2 and 4 of 4
                unlabelled = "[...document.querySelectorAll('svg, progress')].filter(x => !x.ariaHidden"
                names = "&& !x.getAttribute('aria-labelledby') && !document.querySelector(`label[for=${x.id}]`)).length"
                assert browser.evaluate(f"{unlabelled} {names}") == 0
                browser.size(320, 800)
                assert browser.evaluate("document.documentElement.scrollWidth <= 320")
        assert browser.complaints == []
        assert all(
            f"127.0.0.1:{port}" in url or url.startswith("data:") for url in browser.requests if "about:" not in url
        )
    finally:
        browser.close()
