"""The report: what is on the page, from hand-made records and from real runs."""

import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from incofl.analysis.runs import read_groups
from incofl.data import Data
from incofl.engine.run import run
from incofl.engine.run_folder import RunFolder
from incofl.report import tables
from incofl.report.figures import by_level, cohorts, of_section, thinned
from incofl.report.page import make_page, write_report
from tests.federations import tiny_config
from tests.shell import Shell

LIMIT = 8_000_000  # bytes of a page


def folder_of(path: Path, accuracies: list[float], *overrides: str) -> Path:
    """A run folder with some mean accuracies, 10 bytes up and 20 down a round, and three equal levels."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.save_config(tiny_config(*overrides))
    for number, value in enumerate(accuracies, 1):
        row = {"round": number, "accuracy": value, "accuracy_by_level": [value] * 3, "loss": 1.0, "test_loss": 1.0}
        row |= {"clients": [0, 5], "rejected": [], "bytes_up": 10, "bytes_down": 20, "seconds": 0.5}
        folder.append(row)
    return path


def rewrite(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Other lines in place of those of a run folder, which are not checked then."""
    folder = RunFolder(path)
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.checksums.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one of them under two seeds."""
    out = tmp_path_factory.mktemp("runs")
    for method, seed in (("heteroavg", 0), ("incoavg", 0), ("incoavg", 1)):
        run(tiny_config(f"method={method}", f"seed={seed}"), out / f"{method}-s{seed}")
    return out


def markup(page: str) -> str:
    """The page without what its scripts hold."""
    return re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)


def figures_of(page: str) -> list[dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def test_one_run(runs: Path, tmp_path: Path) -> None:
    write_report([runs / "incoavg-s0"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(page.encode()) < LIMIT
    summary = json.loads((runs / "incoavg-s0" / "summary.json").read_text())
    text = markup(page)
    assert f"<dt>last</dt><dd>{100 * summary['accuracy']:.1f}</dd>" in text
    assert "<title>incoavg on digits</title>" in text
    assert "3 of 3" in text
    assert 'class="legend"' not in text  # nothing to choose from
    environment = json.loads((runs / "incoavg-s0" / "environment.json").read_text())
    assert environment["torch"] in text
    ids = {figure["id"] for figure in figures_of(page)}
    assert ids >= {"accuracy", "loss", "levels", "levels-last", "theta", "beta", "norm-deep", "norm-shallow"}
    assert ids >= {"bytes", "bytes-total", "accuracy-bytes", "seconds", "cohorts"}
    assert "training memory" in text
    assert "incofl analyze RUN" in text


def test_nothing_is_loaded_from_elsewhere(runs: Path) -> None:
    page = make_page(read_groups([runs]))
    addresses = re.findall(r"""\b(?:src|href|data|srcset|action)\s*=\s*["']?([^"'\s>]+)""", markup(page))
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses), addresses
    assert "@import" not in page.partition("</style>")[0]
    assert "url(" not in page.partition("</style>")[0]
    assert page.count("<script") == page.count("</script>") == 3


def test_a_comparison_is_grouped_by_config(runs: Path) -> None:
    groups = read_groups([runs])
    assert [(group.label, [run.config.seed for run in group.runs]) for group in groups] == [
        ("heteroavg", [0]),
        ("incoavg", [0, 1]),
    ]
    page = make_page(groups)
    assert len(page.encode()) < LIMIT
    text = markup(page)
    assert re.findall(r'data-group="(\d)">.*?</svg>(\w+)<', text) == [("0", "heteroavg"), ("1", "incoavg")]
    assert "mean ± half width of the 95 % confidence interval" in text
    assert '<th scope="row">seed</th><td>0</td><td>0, 1</td>' in text
    assert '<th scope="row">method</th><td>heteroavg</td><td>incoavg</td>' in text


def test_the_page_opens_with_the_answer(tmp_path: Path) -> None:
    """All levels are equal here: 62 and 64 against 60 and 61 is +2.5, ± 12.7 * 0.5 with two seeds."""
    for method, values in {"allsmall": (0.60, 0.61), "heteroavg": (0.62, 0.64)}.items():
        for seed, value in enumerate(values):
            folder_of(tmp_path / f"{method}-{seed}", [0.1, value], f"method={method}", f"seed={seed}", "rounds=2")
    words, lines = tables.verdict(read_groups([tmp_path]))
    assert words.startswith(
        "No method is seen to be better than allsmall: heteroavg has 63.0 % in the mean over devices"
    )
    assert "+2.5 ± 6.4 points" in words
    assert [line.cells["method"] for line in lines] == ["heteroavg"]
    text = markup(make_page(read_groups([tmp_path])))
    assert text.index(f'<p class="answer">{words}</p>') < text.index('<h2 id="results">')
    other = folder_of(tmp_path / "other", [0.1, 0.2], "method=heteroavg", "data.clients=9", "rounds=2")
    assert tables.verdict(read_groups([tmp_path, other])) == ("", [])  # another fleet


def test_levels_are_called_what_their_devices_are_and_the_answer_has_its_price(tmp_path: Path) -> None:
    """What a turn computes: the largest level's multiply-accumulates against those of the smallest."""
    names = 'split.names=["phone","tablet","workstation"]'
    for method, value in {"allsmall": 0.6, "heteroavg": 0.5}.items():
        folder_of(tmp_path / method, [0.1, value], f"method={method}", "rounds=2", names)
    groups = read_groups([tmp_path])
    words, (line,) = tables.verdict(groups)
    assert "not seen not to be: phone (-10.0 against allsmall); tablet (-10.0 against allsmall); " in words
    federation = groups.runs[0].outline
    times = federation.costs[2].macs / federation.costs[0].macs
    assert words.endswith(f" The largest turn of heteroavg computes {times:.1f} times as much as that of allsmall.")
    assert times > 1.5
    assert "workstation minus allsmall" in line.cells
    assert "workstation" in tables.results(groups)[1].cells
    assert "workstation" in by_level(groups)[0].panels[0].bars
    other = folder_of(tmp_path / "other", [0.1, 0.2], "method=heteroavg", "rounds=2")
    assert "level 2" in tables.results(read_groups([tmp_path, other]))[1].cells  # they do not agree


def test_there_is_no_answer_without_baselines(runs: Path) -> None:
    assert tables.verdict(read_groups([runs])) == ("", [])
    assert 'class="answer"' not in markup(make_page(read_groups([runs])))


def drawn(page: str, folder: Path) -> dict[str, Any]:
    """What the page's own script asks plotly.js to draw, and the tables that it makes of the figures."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    (folder / "drawn.html").write_text(page)
    command = ["node", str(Path(__file__).with_name("draw.js")), str(folder / "drawn.html")]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def test_every_figure_is_one_that_plotly_knows(runs: Path, tmp_path: Path) -> None:
    """Names of attributes are checked by plotly itself."""
    objects = pytest.importorskip("plotly.graph_objects")
    page = make_page(read_groups([runs]))
    plots = drawn(page, tmp_path)["drawn"]
    for figure in figures_of(page):
        for at, panel in enumerate(figure["panels"]):
            plot = plots[f"figure-{figure['id']}-{at}"]
            objects.Figure(data=plot["data"], layout=plot["layout"])
            assert [trace["y"] for trace in plot["data"]] == [curve["y"] for curve in panel["curves"]]
        assert figure["caption"]


def test_looks_and_axes_of_the_figures(runs: Path, tmp_path: Path) -> None:
    found = drawn(make_page(read_groups([runs])), tmp_path)
    accuracy = found["drawn"]["figure-accuracy-0"]
    assert [trace["mode"] for trace in accuracy["data"]] == ["lines+markers", "lines", "lines", "lines+markers"]
    assert [trace["line"].get("dash") for trace in accuracy["data"]] == ["solid", None, None, "dash"]
    assert accuracy["layout"]["hovermode"] == "x unified"
    assert not accuracy["layout"]["showlegend"]
    assert found["drawn"]["figure-levels-last-0"]["layout"]["yaxis"]["range"] == [0, 1]
    panels = [found["drawn"][f"figure-levels-{at}"] for at in range(3)]
    values = [value for panel in panels for trace in panel["data"] for value in trace["y"]]
    for low, high in (panel["layout"]["yaxis"]["range"] for panel in panels):  # the same for all, with some room
        assert 0 <= low <= min(values) <= max(values) < high < max(values) + 0.1
    assert [plot["layout"]["height"] for plot in (accuracy, panels[0])] == [340, 250]
    cohorts = found["drawn"]["figure-cohorts-0"]
    assert {trace["mode"] for trace in cohorts["data"]} == {"markers"}
    assert cohorts["layout"]["showlegend"]
    assert found["tables"]["bytes"][0][0] == [
        "round",
        "heteroavg",
        "incoavg, seed 0",
        "incoavg, seed 1",
        "incoavg, mean of 2",
    ]
    assert [line[0] for line in found["tables"]["bytes"][0][1:]] == [1, 2, 3]
    assert found["tables"]["accuracy-bytes"][0][0] == ["run", "bytes", "test accuracy by bytes"]


def test_levels_stand_in_order_when_a_run_with_one_level_comes_first(tmp_path: Path) -> None:
    """alllarge trains the largest level alone; the bars of the others used to come after it."""
    first = folder_of(tmp_path / "a", [0.5], "method=alllarge")
    (first / "summary.json").write_text(json.dumps({"levels": [2], "rounds": 1}))
    (row,) = RunFolder(first).rows()
    rewrite(first, [row | {"accuracy_by_level": [0.5]}])
    second = folder_of(tmp_path / "b", [0.6], "method=heteroavg")
    groups = read_groups([first, second])
    bars = by_level(groups)[0].panels[0]
    assert [bar.x for bar in bars.curves] == [["level 2"], ["level 0", "level 1", "level 2"]]
    assert bars.bars == ["level 0", "level 1", "level 2"]
    found = drawn(make_page(groups), tmp_path)
    axis = found["drawn"]["figure-levels-last-0"]["layout"]["xaxis"]
    assert (axis["categoryorder"], axis["categoryarray"]) == ("array", ["level 0", "level 1", "level 2"])
    (table,) = found["tables"]["levels-last"]
    assert [line[0] for line in table] == ["level", "level 0", "level 1", "level 2"]
    assert [line[1] for line in table[1:]] == ["", "", "50.00 %"]


def test_the_mean_is_of_the_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    """(0.2 + 0.4) / 2 = 0.3 and (0.4 + 0.8) / 2 = 0.6; the third round is of one seed alone."""
    folder_of(tmp_path / "s2", [0.2, 0.4, 0.9], "seed=2")
    folder_of(tmp_path / "s10", [0.4, 0.8], "seed=10")
    groups = read_groups([tmp_path])
    assert [[run.path.name for run in group.runs] for group in groups] == [["s2", "s10"]]
    (panel,) = of_section("curves", groups)[0].panels
    first, second, mean = panel.curves
    assert (first.y, second.y) == ([0.2, 0.4, 0.9], [0.4, 0.8])
    assert (mean.name, mean.x, mean.y) == ("incoavg, mean of 2", [1, 2], [0.3, 0.6])
    # So short runs are judged by their last evaluation: 0.9 and 0.8, mean 0.85, standard error 0.05, t = 12.706.
    bars = by_level(groups)[0].panels[0].curves[0]
    assert bars.y == pytest.approx([0.85] * 3)
    assert bars.half == pytest.approx([12.7062047364 * 0.05] * 3, rel=1e-4)
    assert "95 % confidence interval (Student's t over seeds)" in by_level(groups)[0].caption
    assert "<td>85.0 ± 63.5</td>" in markup(make_page(groups))


def test_the_measure_is_named(tmp_path: Path) -> None:
    """Of 60 evaluations the last ten count, of 15 the last three."""
    folder_of(tmp_path / "long", [0.1] * 50 + [0.2] * 10)
    folder_of(tmp_path / "short", [0.1] * 12 + [0.4] * 3)
    long, short = read_groups([tmp_path / "long"]), read_groups([tmp_path / "short"])
    assert "<dt>mean of rounds 51-60</dt><dd>20.0</dd>" in markup(make_page(long))
    assert "<dt>mean of rounds 13-15</dt><dd>40.0</dd>" in markup(make_page(short))
    folder_of(tmp_path / "seeds" / "0", [0.1] * 12 + [0.4] * 3)
    folder_of(tmp_path / "seeds" / "1", [0.1] * 12 + [0.4] * 3, "seed=1")
    assert '<th scope="col">mean of rounds 13-15</th>' in markup(make_page(read_groups([tmp_path / "seeds"])))
    assert by_level(short)[0].title == "Accuracy by level, mean of rounds 13-15"
    assert by_level(short)[0].panels[0].curves[0].y == [0.4] * 3


def test_another_metric_is_named_and_not_in_percent(tmp_path: Path) -> None:
    """RMSE: lower is better."""
    path = folder_of(tmp_path / "r", [3.0, 1.25, 1.5], "task.name=regression")
    groups = read_groups([path])
    assert "<dt>best</dt><dd>1.25</dd>" in markup(make_page(groups))
    accuracy, _ = of_section("curves", groups)
    assert (accuracy.title, accuracy.unit) == ("Test rmse", "number")
    assert "range" not in drawn(make_page(groups), tmp_path)["drawn"]["figure-levels-last-0"]["layout"]["yaxis"]
    assert "in percent" not in markup(make_page(groups))


def test_a_run_of_objects_that_only_its_script_has(tmp_path: Path, incofl: Shell) -> None:
    inputs, targets = torch.randn(80, 6), torch.randint(3, (80,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    config = {"rounds": 2, "cohort": 2, "data": {"clients": 4}, "local": {"epochs": 1, "batch_size": 8}}
    config |= {"split": {"kind": "hetero", "levels": 2}}
    data = Data((inputs, targets), (inputs, targets))
    run(config, tmp_path / "mine", model=lambda: model, data=data, progress=False)
    code, _, err = incofl("report", tmp_path / "mine", "-o", tmp_path / "page.html")
    assert (code, err) == (0, "")
    text = markup((tmp_path / "page.html").read_text())
    assert "2 of 2" in text
    assert "cannot be computed here" in text


def test_accuracy_against_bytes(tmp_path: Path) -> None:
    """30 bytes a round, down and up together."""
    folder_of(tmp_path / "r", [0.2, 0.4, 0.6])
    groups = read_groups([tmp_path / "r"])
    figures = {figure.id: figure for figure in of_section("communication", groups)}
    (curve,) = figures["accuracy-bytes"].panels[0].curves
    assert (curve.x, curve.y) == ([30, 60, 90], [0.2, 0.4, 0.6])
    assert figures["bytes"].panels[0].curves[0].y == [30, 30, 30]
    words = drawn(make_page(groups), tmp_path)["drawn"]["figure-bytes-total-0"]["words"]
    assert words == "Bytes in total. incoavg: 90 bytes at round 3."


def test_runs_of_a_method_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", [0.1], "data.alpha=0.1")
    folder_of(tmp_path / "b", [0.1], "data.alpha=5")
    assert [group.label for group in read_groups([tmp_path])] == ["incoavg, alpha 0.1", "incoavg, alpha 5"]


def test_a_run_that_goes_on(runs: Path, tmp_path: Path) -> None:
    """A half-written line is left out; without a summary the levels follow from the rows."""
    path = folder_of(tmp_path / "r", [0.5, 0.6], "method=heteroavg")
    with RunFolder(path).metrics.open("a") as file:
        file.write('{"round": 3, "accu')
    groups = read_groups([path])
    assert groups.runs[0].summary["status"] == "unfinished"
    assert groups.runs[0].levels == [0, 1, 2]
    text = markup(make_page(groups))
    assert "2 of 3" in text
    assert of_section("inco", groups) == []
    assert 'id="inco"' not in text


def test_many_rounds_are_thinned_and_end_where_they_end() -> None:
    x, y = thinned((list(range(1, 1002)), [float(i) for i in range(1001)]), 400)
    assert len(x) <= 400
    assert (x[-1], y[-1]) == (1001, 1000.0)
    assert len({b - a for a, b in pairwise(x)}) == 1


def test_a_page_of_many_long_runs_stays_light(tmp_path: Path) -> None:
    """Five seeds each of two configs, 500 rounds, 20 mixed tensors of made-up numbers."""
    entry = {
        "theta": 0.123456789,
        "beta": 1e-6,
        "beta_positive": 0.512345678,
        "norm_deep": 1.2345678,
        "norm_shallow": 1.0,
    }
    mixed = {"inco": {f"layer{i}.conv.weight": entry for i in range(20)}}
    for alpha in (1, 2):
        for seed in range(5):
            folder = RunFolder(
                folder_of(tmp_path / f"{alpha}-{seed}", [0.123456789], f"seed={seed}", f"data.alpha={alpha}")
            )
            (row,) = folder.rows()
            rewrite(folder.path, [row | mixed | {"round": number} for number in range(1, 501)])
    groups = read_groups([tmp_path])
    assert [len(group.runs) for group in groups] == [5, 5]
    assert len(make_page(groups).encode()) < LIMIT


def test_what_others_wrote_cannot_break_the_page(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    path = folder_of(tmp_path / "r", [0.5])
    (path / "analysis").mkdir()
    (path / "analysis" / "similarity.json").write_text(json.dumps({"points": [evil], "mean_by_depth": [0.5]}))
    rows = RunFolder(path).rows()
    rows[0]["rejected"] = [{"client": 3, "reason": evil}]
    rewrite(path, [rows[0]])
    page = make_page(read_groups([path]), title=evil)
    assert "<img" not in markup(page)
    assert page.count("</script>") == 3
    assert "&lt;img src=x onerror=alert(1)&gt;</th>" in page  # the heading of a table


def test_similarity_as_it_was_analysed(tmp_path: Path) -> None:
    """A constant representation has no CKA: analyze writes null."""
    path = folder_of(tmp_path / "r", [0.5, 0.6])
    found: dict[str, Any] = {"round": 2, "points": ["a", "b"], "mean_by_depth": [0.9, None], "examples": 7}
    found["correlation"] = {"a": {"pearson": 1.0}, "b": {"pearson": 0.25, "spearman": None, "points": 2}}
    (path / "analysis").mkdir()
    (path / "analysis" / "similarity.json").write_text(json.dumps(found))
    ((line,),) = tables.similarity(groups := read_groups([path]))
    cells = {"run": "incoavg", "a": "0.900", "b": "\N{EN DASH}", "r with accuracy": "0.250"}
    assert line.cells == cells
    text = markup(make_page(groups)).partition("Mean CKA between client models")[2].partition("</table>")[0]
    assert re.findall(r'<th scope="col">(.*?)</th>', text) == list(cells)
    assert re.findall(r"<td>(.*?)</td>", text) == list(cells.values())[1:]


def test_pictures_of_the_analyses_are_on_the_page(tmp_path: Path) -> None:
    """Those of the first seed of a group, and those that compare all runs."""
    for seed in (0, 1):
        folder_of(tmp_path / f"s{seed}", [0.5], f"seed={seed}")
    data = b"\x89PNG of a run"
    for folder in (tmp_path / "s0", tmp_path):
        (folder / "analysis").mkdir()
        (folder / "analysis" / "updates.png").write_bytes(data)
    text = markup(make_page(read_groups([tmp_path])))
    images = re.findall(r'<img alt="(.*?)" src="data:image/png;base64,(.*?)">', text)
    assert [base64.b64decode(content) for _, content in images] == [data, data]
    assert all(alt.startswith("Distributions of the aggregated updates") for alt, _ in images)
    assert "<h3>All runs</h3>" in text
    assert "<h3>incoavg (one of 2 seeds)</h3>" in text


def test_the_cohorts_and_who_was_rejected(tmp_path: Path) -> None:
    """Ten clients in three levels of 4, 3 and 3: client 5 is of level 1."""
    path = folder_of(tmp_path / "r", [0.5])
    rows = RunFolder(path).rows()
    rows[0]["rejected"] = [{"client": 9, "reason": "not finite"}]
    rewrite(path, [rows[0]])
    groups = read_groups([path])
    figure = cohorts(groups)
    assert [(dots.name, dots.x, dots.y) for dots in figure.panels[0].curves] == [
        ("level 0", [1], [0]),
        ("level 1", [1], [5]),
        ("rejected", [1], [9]),
    ]
    said = "Who took part, incoavg. level 0: 1 mark(s); level 1: 1 mark(s); rejected: 1 mark(s)."
    assert drawn(make_page(groups), tmp_path)["drawn"]["figure-cohorts-0"]["words"] == said
    rows[0]["nodes"] = [{"client": 5, "level": 2}]  # what a node got, whatever the config gives its number
    rewrite(path, [rows[0]])
    figure = cohorts(read_groups([path]))
    assert [(dots.name, dots.y) for dots in figure.panels[0].curves][1] == ("level 2", [5])


def test_the_fleet_is_shown_where_it_was_watched(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "r", [0.5])
    rows = RunFolder(path).rows()
    assert of_section("fleet", read_groups([path])) == []
    assert 'id="fleet"' not in markup(make_page(read_groups([path])))
    rows[0]["nodes"] = [
        {"client": 0, "node": "edge-1", "seconds": 1.0, "peak_memory": 2_000_000, "bytes_up": 5, "bytes_down": 6},
        {"client": 5, "node": "edge-2", "seconds": 3.0},
    ]
    rewrite(path, [rows[0]])
    page = make_page(read_groups([path]))
    found = {figure["id"]: figure["panels"][0]["curves"][0]["y"] for figure in figures_of(page)}
    assert (found["slowest"], found["median"], found["memory"]) == ([3.0], [2.0], [2_000_000])
    assert "edge-1" in markup(page)
    assert "2 MB" in markup(page)


def test_a_model_that_is_gone_is_said(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "r", [0.5])
    config = RunFolder(path).config
    config.write_text(config.read_text().replace('"tiny-resnet"', '"gone.module:factory"'))
    assert "cannot be computed here: " in markup(make_page(read_groups([path])))


def test_command(incofl: Shell, runs: Path, tmp_path: Path) -> None:
    code, out, err = incofl(
        "report", runs, runs / "incoavg-s0", "-o", tmp_path / "new" / "page.html", "--title", "A & B"
    )
    assert (code, err) == (0, "")
    assert "3 run(s)" in out
    assert "<h1>A &amp; B</h1>" in (tmp_path / "new" / "page.html").read_text()


def test_bad_input_is_one_clear_line(
    incofl: Shell, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    begun = tmp_path / "begun" / "r"
    folder_of(begun, [])
    for path, message in (
        (tmp_path / "none", "none: no such folder"),
        (tmp_path / "empty", "holds no run"),
        (begun, "holds no finished round"),
        (begun.parent, "holds 1 run folder(s) but no finished round"),
    ):
        for others in ([], [runs]):  # alone, and next to runs that there are
            code, _, err = incofl("report", *others, path, "-o", tmp_path / "page.html")
            assert code == 2
            assert message in err
            assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, _, err = incofl("report", runs, "-o", tmp_path / "page.html")
    assert (code, err) == (2, "incofl: report: needs plotly; try: pip install 'incofl[report]'\n")
    assert not (tmp_path / "page.html").exists()


def test_a_page_replaces_nothing_but_a_page(tmp_path: Path, incofl: Shell) -> None:
    folder = folder_of(tmp_path / "run", [0.5, 0.6])
    before = (folder / "metrics.jsonl").read_bytes()
    for out, words in (
        (folder / "metrics.jsonl", "holds something else than a page; choose another name, such as report.html"),
        (folder, "run: is a folder, expected a file such as"),
    ):
        code, _, err = incofl("report", folder, "-o", out)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err
    assert (folder / "metrics.jsonl").read_bytes() == before
    for _ in range(2):
        assert incofl("report", folder, "-o", tmp_path / "page.html")[0] == 0
