"""Whether everybody can use the pages: axe-core in a real Chromium, on the report, the site and the live page.

axe-core is no part of the repository: npm fetches it, or ``INCOFL_AXE`` names its axe.min.js.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import incofl as library
from tests.browser import CHROMIUM, Browser
from tests.federations import tiny_config
from tests.report.test_live import serving
from tests.report.test_report_browser import LOOK
from tests.shell import Shell

ROOT = Path(__file__).parents[1]
AXE = "axe-core@4.14.0"
SMALL = ("model.name=tiny-mlp", "data.limit=150", "eval.every=2", "rounds=4")
# What axe-core finds, the grave things only: which rule, and where.
GRAVE = """axe.run(document, {resultTypes: ["violations"]}).then(found => ({
  passes: found.passes.length,
  grave: found.violations.filter(each => ["serious", "critical"].includes(each.impact))
    .map(each => [each.id, each.help, each.nodes.slice(0, 5).map(node => node.html.slice(0, 160) + " " +
      node.any.concat(node.all, node.none).map(check => check.message).join("; "))]),
}))"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script itself."""
    if given := os.environ.get("INCOFL_AXE"):
        return Path(given).read_text(encoding="utf-8")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("axe-core is fetched by npm, which is not installed; or set INCOFL_AXE to its axe.min.js")
    place = tmp_path_factory.mktemp("axe")
    done = subprocess.run([npm, "pack", AXE], cwd=place, capture_output=True, text=True, timeout=300, check=False)
    packed = list(place.glob("*.tgz"))
    if done.returncode or not packed:
        pytest.skip(f"npm cannot fetch {AXE}; set INCOFL_AXE to its axe.min.js")
    with tarfile.open(packed[0]) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    started = Browser(tmp_path / "profile")
    yield started
    started.close()


def check(
    browser: Browser,
    axe: str,
    load: Callable[[], None],
    schemes: Sequence[str] = ("light", "dark"),
    widths: Sequence[int] = (1280, 360),
) -> None:
    """Nothing serious or critical, in light and in dark colours, on a screen and on a phone."""
    found: dict[str, Any] = {}
    for scheme in schemes:
        browser.media(scheme=scheme)
        browser.size(1280, 900)
        browser.evaluate("location.protocol !== 'about:' && localStorage.clear()")  # colours that a page remembers
        browser.call("Page.navigate", url="about:blank")
        browser.wait("location.protocol === 'about:'")
        load()
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 300) == (scheme == "dark"), ground
        for width in widths:
            browser.size(width, 900)
            browser.evaluate("new Promise(done => setTimeout(done, 500))")  # colours fade
            browser.evaluate(f"{axe};true")
            result = browser.evaluate(GRAVE)
            assert result["passes"] > 10
            if result["grave"]:
                found[f"{browser.evaluate('document.title')}, {scheme}, {width}"] = result["grave"]
    assert not found, json.dumps(found, indent=1)


def test_a_page_with_faults_is_told(browser: Browser, axe: str, tmp_path: Path) -> None:
    """The check sees what it is for."""
    page = tmp_path / "bad.html"
    page.write_text("<html><body><img src='data:,'><button></button><p style='color:#ddd'>faint</p></body></html>")
    browser.open(page)
    browser.evaluate(f"{axe};true")
    told = {rule for rule, _, _ in browser.evaluate(GRAVE)["grave"]}
    assert {"image-alt", "button-name", "color-contrast", "html-has-lang"} <= told


def test_the_report(browser: Browser, axe: str, tmp_path: Path, incofl: Shell) -> None:
    """With two methods, under two seeds each."""
    for method in ("heteroavg", "incoavg"):
        for seed in (0, 1):
            config = tiny_config(*SMALL, f"method={method}", f"seed={seed}")
            library.run(config, tmp_path / "runs" / f"{method}-{seed}", progress=False)
    code, _, err = incofl("report", tmp_path / "runs", "-o", tmp_path / "report.html")
    assert (code, err) == (0, "")

    def load() -> None:
        browser.open(tmp_path / "report.html", "document.documentElement.dataset.drawn")
        browser.evaluate(LOOK)
        browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")

    check(browser, axe, load)


def test_the_site(browser: Browser, axe: str, tmp_path: Path) -> None:
    """Its front page in all ways, the others on a phone, where tables and code have the least room."""
    pytest.importorskip("material")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(browser, axe, lambda: browser.open(site / "index.html"))
    pages = [page for page in sorted(site.glob("*.html")) if page.name not in ("index.html", "404.html")]
    assert len(pages) > 25
    for page in pages:
        check(browser, axe, functools.partial(browser.open, page), schemes=("light",), widths=(360,))


def test_the_live_page(browser: Browser, axe: str, tmp_path: Path) -> None:
    """Before the first evaluation, and at the end."""
    with library.Run(tiny_config(*SMALL), tmp_path / "run", progress=False) as run:
        rounds = iter(run)
        next(rounds)
        with serving(tmp_path / "run") as port:

            def load() -> None:
                browser.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
                browser.wait(f"document.getElementById('far')?.textContent === 'round {len(run.rows)} of 4'")

            check(browser, axe, load)
            list(rounds)
            run.close()
            check(browser, axe, load)
