"""The report in a real Chromium: drawn, readable, and usable by pointer, keyboard and on paper."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from incofl.engine.run import run
from incofl.report.page import write_report
from tests.browser import CHROMIUM, Browser
from tests.federations import tiny_config
from tests.report.test_report import rewrite

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]

DRAWN = "document.documentElement.dataset.drawn"
SCHEME = "document.getElementById('scheme').textContent"  # the one that the button offers
# What is out of sight is drawn when it is looked at.
LOOK = """(async () => {
  for (const plot of document.querySelectorAll(".plot")) {
    plot.scrollIntoView();
    while (!plot.querySelector(".main-svg") || plot.dataset.stale) await new Promise(requestAnimationFrame);
  }
})()"""
# Text that is drawn too faintly: WCAG AA asks for 4.5 to 1, and for 3 to 1 of lines and large text.
FAINT = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const ground = element => {
    for (; element; element = element.parentElement) {
      const colour = rgb(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const faint = new Set();
  let checked = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || element.closest("script, style")) continue;
    const style = getComputedStyle(element);
    const front = rgb(element.closest("svg") ? style.fill : style.color);
    checked += 1;
    if (ratio(front, ground(element)) < 4.5) faint.add(`${element.tagName}.${element.className}: ${front}`);
  }
  const probe = document.body.appendChild(document.createElement("i"));
  for (let at = 0; at < 7; at++) {
    probe.style.color = `var(--c${at})`;
    const line = rgb(getComputedStyle(probe).color);
    if (ratio(line, ground(document.querySelector(".card"))) < 3) faint.add(`--c${at}: ${line}`);
  }
  probe.remove();
  return { checked, faint: [...faint] };
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one of them under two seeds, with all that can be on a page."""
    out = tmp_path_factory.mktemp("runs")
    for method, seed in (("heteroavg", 0), ("incoavg", 0), ("incoavg", 1)):
        run(tiny_config(f"method={method}", f"seed={seed}"), out / f"{method}-s{seed}")
    analysis = out / "incoavg-s0" / "analysis"
    analysis.mkdir()
    clients = [{"client": 0, "level": 0}, {"client": 9, "level": 2}]
    found = {"round": 3, "points": ["stage 1", "stage 2"], "clients": clients, "mean_by_depth": [0.9, 0.5]}
    found |= {"cka": [[[1, 0.9], [0.9, 1]], [[1, 0.5], [0.5, 1]]], "examples": 100, "correlation": {"pearson": 0.5}}
    (analysis / "similarity.json").write_text(json.dumps(found))
    metrics = out / "heteroavg-s0" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row["nodes"] = [
            {"client": c, "node": f"edge-{c}", "seconds": 1.5, "peak_memory": 10**8} for c in row["clients"]
        ]
    rows[0]["rejected"] = [{"client": 3, "reason": "client 3: not finite"}]
    rewrite(metrics.parent, rows)
    write_report([out], out / "report.html")
    return out / "report.html"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    profile = tmp_path_factory.mktemp("profile")
    browser = Browser(profile)
    yield browser
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture
def browser(started: Browser, page: Path) -> Browser:
    """The page, light, on a wide screen, as it comes."""
    started.size(1280, 900)
    started.media()
    if not started.requests:
        started.open(page, DRAWN)
    started.evaluate("scrollTo(0, 0); document.activeElement?.blur()")
    started.wait(f"{SCHEME} === 'Dark colours' && !document.getElementById('figure-accuracy-0').dataset.stale")
    return started


def test_it_loads_and_draws(browser: Browser) -> None:
    assert browser.complaints == []
    assert all(address.startswith(("file:", "data:", "blob:")) for address in browser.requests), browser.requests
    browser.evaluate(LOOK)
    drawn = browser.evaluate(
        """[...document.querySelectorAll(".plot")].map(plot => [plot.id, plot.data[0].type,
            Math.max(0, ...[...plot.querySelectorAll(".js-line, .point path, .points path")]
                .map(path => path.getAttribute("d")?.length ?? 0))])"""
    )
    assert len(drawn) > 15
    for name, _, longest in drawn:
        assert longest > 10, name
    lines = browser.evaluate('document.querySelectorAll("#figure-accuracy-0 .js-line").length')
    assert lines == 4  # heteroavg, two seeds of incoavg, and their mean
    path = browser.evaluate('document.querySelector("#figure-accuracy-0 .js-line").getAttribute("d")')
    assert path.count("L") + path.count("C") + path.count(",") >= 3  # three rounds


def test_hovering_shows_the_values(browser: Browser, page: Path) -> None:
    rows = [json.loads(line) for line in (page.parent / "heteroavg-s0" / "metrics.jsonl").read_text().splitlines()]
    x, y = browser.evaluate(
        """(() => {
          const plot = document.getElementById("figure-accuracy-0");
          plot.scrollIntoView({ block: "center" });
          const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
          const axis = plot._fullLayout.xaxis;
          return [box.left + axis.l2p(2), box.top + box.height / 2];
        })()"""
    )
    browser.point(x - 2, y)
    browser.point(x, y)
    shown = '[...document.querySelectorAll("#figure-accuracy-0 .hoverlayer text")].map(t => t.textContent).join(" ")'
    browser.wait(f"{shown}.includes('heteroavg')")
    text = browser.evaluate(shown)
    assert f"{100 * rows[1]['accuracy']:.1f}%" in text
    assert "incoavg, mean of 2" in text
    browser.point(1, 1)


def test_the_keyboard_reaches_everything(browser: Browser) -> None:
    expected = browser.evaluate('document.querySelectorAll("a, button, summary, .plot").length')
    seen: dict[str, str] = {}
    for _ in range(300):
        browser.press("Tab", 9)
        name, kind, outline = browser.evaluate(
            """(() => {
              const at = document.activeElement;
              at.dataset.at ??= String([...document.querySelectorAll("*")].indexOf(at));
              return [at.dataset.at, at.tagName + "." + at.className, getComputedStyle(at).outlineStyle];
            })()"""
        )
        if name in seen or kind.startswith(("BODY", "HTML")):
            break
        assert outline != "none", kind  # it can be seen where one is
        seen[name] = kind
    controls = [kind for kind in seen.values() if kind.split(".")[0] in ("A", "BUTTON", "SUMMARY") or "plot" in kind]
    assert len(controls) == expected
    assert next(iter(seen.values())) == "A.skip"


def test_arrow_keys_walk_along_a_curve(browser: Browser) -> None:
    browser.evaluate('document.getElementById("figure-loss-0").focus()')
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    browser.wait('document.querySelector("#figure-loss-0 .hoverlayer text")')
    assert "heteroavg, 2: " in browser.evaluate('document.getElementById("live").textContent')
    assert "incoavg, mean of 2, 2: " in browser.evaluate('document.getElementById("live").textContent')


def test_a_group_is_switched_off_and_on(browser: Browser) -> None:
    lines = 'document.querySelectorAll("#figure-accuracy-0 .js-line").length'
    browser.evaluate("document.querySelectorAll('.legend button')[1].focus()")
    browser.press(" ", 32)
    browser.wait(f"{lines} === 1")
    assert browser.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    browser.press(" ", 32)
    browser.wait(f"{lines} === 4")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(browser: Browser, scheme: str) -> None:
    browser.media(scheme=scheme)
    browser.wait(f"{SCHEME} === '{'Light' if scheme == 'dark' else 'Dark'} colours'")
    browser.evaluate(LOOK)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 19, 23)") == (scheme == "dark")
    found = browser.evaluate(FAINT)
    assert found["checked"] > 200
    assert found["faint"] == []


def test_the_scheme_can_be_chosen(browser: Browser) -> None:
    colour = 'getComputedStyle(document.querySelector("#figure-accuracy-0 .xtick text")).fill'
    before = browser.evaluate(colour)
    browser.evaluate('document.getElementById("scheme").click()')
    browser.wait(f"{colour} !== '{before}'")
    assert browser.evaluate(SCHEME) == "Light colours"
    browser.evaluate('document.getElementById("scheme").click()')
    browser.wait(f"{colour} === '{before}'")


def test_figures_have_words_and_numbers(browser: Browser) -> None:
    assert browser.evaluate('[...document.images].every(image => image.alt || image.closest("[role=img]"))')
    assert browser.evaluate('[...document.querySelectorAll("[role=img]")].every(p => p.ariaLabel.length > 10)')
    browser.evaluate('document.querySelectorAll("figure details").forEach(details => { details.open = true; })')
    browser.wait('[...document.querySelectorAll("figure details")].every(d => d.querySelectorAll("td").length)')
    cells = browser.evaluate(
        '[...document.querySelectorAll("#figure-bytes details tr")].map(r => [...r.cells].map(c => c.textContent))'
    )
    assert cells[0] == ["round", "heteroavg", "incoavg, seed 0", "incoavg, seed 1", "incoavg, mean of 2"]
    assert [row[0] for row in cells[1:]] == ["1", "2", "3"]
    browser.evaluate('document.querySelectorAll("figure details").forEach(details => { details.open = false; })')


def test_a_narrow_screen_has_no_sideways_scrolling(browser: Browser) -> None:
    browser.size(390, 800)
    browser.wait('document.querySelector(".plot .main-svg").getBoundingClientRect().right <= 390')
    browser.evaluate(LOOK)
    wide = '[...document.querySelectorAll(".main-svg")].filter(svg => svg.getBoundingClientRect().right > 390).length'
    assert browser.evaluate(wide) == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390


def test_paper_shows_all_of_it(browser: Browser) -> None:
    browser.media("print", "dark")
    browser.wait("document.documentElement.classList.contains('printing')")
    browser.evaluate("new Promise(done => setTimeout(done, 300))")
    width = browser.evaluate("document.body.getBoundingClientRect().width")
    assert width <= 680  # what A4 leaves between margins of 15 mm
    clipped = browser.evaluate(
        f"""[...document.querySelectorAll(".plot .main-svg, table, p:not(.hidden), h1, .scroll")].filter(element => {{
          const box = element.getBoundingClientRect();
          return box.width && (box.right > {width} + 1 || element.scrollWidth > element.clientWidth + 1
            && getComputedStyle(element).overflowX !== "visible");
        }}).map(element => element.outerHTML.slice(0, 80))"""
    )
    assert clipped == []
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate('getComputedStyle(document.querySelector(".xtick text")).fill') == "rgb(27, 31, 36)"
    assert browser.pdf().startswith(b"%PDF-")
    assert browser.complaints == []
