"""The command line end to end: what a user types, sees, and gets for an exit code."""

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.shell import Shell
from tests.test_costs import STAGE_MACS, STAGE_PARAMETERS, WIDTH_MACS, WIDTH_PARAMETERS

SMALL = [
    *("--set", "data.clients=10", "--set", "data.limit=300", "--set", "cohort=4", "--set", "split.levels=3"),
    *("--set", "model.name=tiny-resnet", "--set", "local.epochs=1", "--set", "rounds=2"),
]


def test_run(incofl: Shell, tmp_path: Path) -> None:
    code, out, err = incofl("run", *SMALL, "--method", "IncoAvg", "--out", tmp_path / "r")
    assert (code, err) == (0, "")
    assert "incoavg on digits: tiny-resnet at width 0.25, stage splitting into 3 levels, 10 clients, 4 a round" in out
    assert "round 1/2  accuracy 0." in out
    assert "round 2/2" in out
    assert "test accuracy by level" in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert f"{summary['accuracy']:.3f}" in out
    assert (tmp_path / "r" / "metrics.jsonl").read_text().count("\n") == 2
    # Resumed when it is finished already: the table again, without training.
    code, out, err = incofl("run", "--resume", "--out", tmp_path / "r")
    assert (code, err) == (0, "")
    assert "resumed after round 2" in out
    assert "test accuracy by level" in out


def test_default_folder_and_quiet(incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = incofl("run", *SMALL, "--quiet")
    assert code == 0
    assert "round 1/2" not in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("fedfloor-digits-s0-")


def test_run_without_evaluation_of_early_rounds(incofl: Shell, tmp_path: Path) -> None:
    code, out, _ = incofl("run", *SMALL, "--set", "eval.every=5", "--out", tmp_path)
    assert code == 0
    assert "round 1/2  loss" in out
    assert "round 2/2  accuracy" in out


@pytest.mark.parametrize(
    ("arguments", "parameters", "macs"),
    [
        (["paper-cifar10"], STAGE_PARAMETERS, STAGE_MACS),
        (["--method", "heteroavg", "--set", "data.name=cifar10"], STAGE_PARAMETERS, STAGE_MACS),
        (
            ["--method", "heteroavg", "--set", "data.name=cifar10", "--set", "split.kind=hetero"],
            WIDTH_PARAMETERS,
            WIDTH_MACS,
        ),
    ],
)
def test_plan_json_prints_the_exact_counts(
    incofl: Shell, arguments: list[str], parameters: list[int], macs: list[int]
) -> None:
    code, out, err = incofl("plan", *arguments, "--json")
    assert (code, err) == (0, "")
    plan: dict[str, Any] = json.loads(out)
    assert [level["parameters"] for level in plan["levels"]] == parameters
    assert [level["macs"] for level in plan["levels"]] == macs
    assert plan["mean_parameters"] == pytest.approx(sum(parameters) / 5)


def test_plan(incofl: Shell) -> None:
    code, out, err = incofl("plan", "paper-cifar10")
    assert (code, err) == (0, "")
    for text in ("2 2 3 3", "4.91 M", "17.5 M", "55.9 M", "19.7 MB", "memory", "12.3 M parameters"):
        assert text in out


DEVICES = """
[[device]]
name = "phone"
count = 6
memory = "12 kB"

[[device]]
name = "workstation"
count = 4
"""


def test_devices_from_plan_to_run(incofl: Shell, tmp_path: Path) -> None:
    tiny = ["--set", "model.name=tiny-mlp", "--set", "split.kind=layer", "--set", "split.levels=[1,3,6]"]
    tiny += ["--set", "local.batch_size=2", "--set", "local.optimizer=sgd", "--set", "local.momentum=0"]
    fleet = tmp_path / "devices.toml"
    fleet.write_text(DEVICES)
    code, out, _ = incofl("plan", *tiny, "--devices", fleet, "--json")
    plan = json.loads(out)
    assert code == 0
    assert [device["level"] for device in plan["devices"]] == [0, 2]
    assert [level["clients"] for level in plan["levels"]] == [6, 0, 4]
    assert plan["levels"][0]["memory"] <= 12_000 < plan["levels"][1]["memory"]
    code, out, _ = incofl("plan", *tiny, "--devices", fleet)
    assert "phone" in out
    assert "workstation" in out
    options = ["--devices", fleet, "--set", "rounds=1", "--set", "data.limit=300", "--out", tmp_path / "r"]
    code, out, err = incofl("run", *tiny, *options)
    assert (code, err) == (0, "")
    config = (tmp_path / "r" / "config.toml").read_text()
    assert "clients = 10" in config
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["levels"] == [0, 2]
    # No class may be left out silently: when nothing fits, the smallest level's needs are named.
    fleet.write_text(DEVICES.replace("12 kB", "1 kB"))
    for command in ("plan", "run"):
        code, out, err = incofl(command, *tiny, "--devices", fleet)
        assert (code, err.count("\n")) == (2, 1)
        assert "device class 'phone': no level fits; the smallest (level 0) needs memory" in err


TINY = [
    *("--set", "model.name=tiny-mlp", "--set", "split.kind=layer", "--set", "split.levels=[1,3,6]"),
    *("--set", "local.batch_size=2", "--set", "local.optimizer=sgd", "--set", "local.momentum=0"),
    *("--set", "rounds=1", "--set", "data.limit=300"),
]


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "devices.toml"
    path.write_text(DEVICES)
    return path


def test_a_method_that_exceeds_the_limits_of_devices_is_refused(incofl: Shell, tmp_path: Path, fleet: Path) -> None:
    """Unless the user asks for this upper bound explicitly; then both tables say the same."""
    options = [*TINY, "--method", "alllarge", "--devices", fleet]
    for command in (["plan"], ["run", "--out", tmp_path / "r"]):
        code, out, err = incofl(*command, *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "device class 'phone': alllarge trains level 2 on it, which needs memory" in err
        assert "kB, has 12 kB; choose another method, or write --ignore-limits to train it anyway" in err
    assert not (tmp_path / "r").exists()
    code, out, _ = incofl("plan", *options, "--ignore-limits", "--json")
    plan = json.loads(out)
    assert [device["level"] for device in plan["devices"]] == [2, 2]
    assert [level["clients"] for level in plan["levels"]] == [0, 0, 10]
    code, out, _ = incofl("plan", *options, "--ignore-limits")
    assert (code, "exceeded" in out, "kB, has 12 kB" in out) == (0, True, True)
    assert incofl("run", *options, "--ignore-limits", "--out", tmp_path / "r")[0] == 0


def test_a_method_that_gives_everybody_the_smallest_level_is_shown_so(incofl: Shell, fleet: Path) -> None:
    _, out, _ = incofl(
        "plan",
        *TINY,
        "--set",
        "split.kind=hetero",
        "--set",
        "split.levels=3",
        "--method",
        "allsmall",
        "--devices",
        fleet,
        "--json",
    )
    plan = json.loads(out)
    assert [device["level"] for device in plan["devices"]] == [0, 0]
    assert [level["clients"] for level in plan["levels"]] == [10, 0, 0]


def test_devices_that_cannot_hold_the_largest_level_take_no_part(incofl: Shell, fleet: Path) -> None:
    options = [*TINY, "--method", "largestonly", "--devices", fleet]
    plan = json.loads(incofl("plan", *options, "--json")[1])
    assert [device["level"] for device in plan["devices"]] == [None, 2]
    assert [level["clients"] for level in plan["levels"]] == [0, 0, 4]
    assert re.search(r"phone +6 +12 kB +- +- +none +-", incofl("plan", *options)[1])
    fleet.write_text(DEVICES.partition('[[device]]\nname = "workstation')[0])
    assert "mean over the 0 clients" in incofl("plan", *options)[1]
    code, _, err = incofl("run", *options)
    assert (code, "largestonly needs clients of the largest level, and no client can hold it" in err) == (2, True)


@pytest.mark.parametrize("key", ["data.clients=7", "split.counts=[5,3,2]", " data.clients = 7"])
def test_a_fleet_and_another_number_of_clients_are_refused(incofl: Shell, fleet: Path, key: str) -> None:
    for command in ("plan", "run"):
        code, _, err = incofl(command, *TINY, "--devices", fleet, "--set", key)
        assert (code, err) == (
            2,
            f"incofl: --set {key.strip()}: {fleet} has 10 clients; leave it out, or change the file\n",
        )
    assert incofl("plan", *TINY, "--devices", fleet, "--set", "data.clients=10")[0] == 0


def test_the_clients_of_a_config_file_are_those_of_the_fleet(incofl: Shell, tmp_path: Path, fleet: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[data]\nclients = 7\n[split]\ncounts = [3, 2, 2]\n")
    code, out, err = incofl("plan", config, *TINY, "--devices", fleet, "--json")
    assert (code, err) == (0, "")
    assert [level["clients"] for level in json.loads(out)["levels"]] == [6, 0, 4]


def test_a_limit_without_its_unit_is_refused(incofl: Shell, fleet: Path) -> None:
    fleet.write_text(DEVICES.replace('"12 kB"', "12"))
    code, _, err = incofl("run", *TINY, "--devices", fleet)
    problem = 'device 1 (phone): memory: got 12, expected a number > 0 with its unit: write "12 MB"'
    assert (code, err) == (2, f"incofl: {fleet}: {problem}\n")


def test_plan_follows_the_method(incofl: Shell) -> None:
    counts = {}
    for method in ("heteroavg", "allsmall", "alllarge"):
        _, out, _ = incofl("plan", "--method", method, "--json")
        counts[method] = [level["clients"] for level in json.loads(out)["levels"]]
    assert counts == {"heteroavg": [4] * 5, "allsmall": [20, 0, 0, 0, 0], "alllarge": [0, 0, 0, 0, 20]}


def test_a_fleet_larger_than_the_default_population(incofl: Shell, tmp_path: Path) -> None:
    fleet = tmp_path / "devices.toml"
    fleet.write_text("[[device]]\nname = '[/odd] name'\ncount = 100\n")
    code, out, err = incofl("plan", "--devices", fleet, "--set", "cohort=50")
    assert (code, err) == (0, "")
    assert "[/odd] name" in out


def test_output_without_unicode(incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "incofl", "run", *SMALL, "--out", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "test accuracy by level" in done.stdout.decode("ascii")


@pytest.mark.slow
def test_live_display_on_a_terminal(tmp_path: Path) -> None:
    """Bars with rounds, clients, accuracy and the time left; then the table."""
    import pty

    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "incofl", "run", *SMALL, "--out", str(tmp_path)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    seen = b""
    while True:
        try:
            part = os.read(main_end, 65536)
        except OSError:  # the other end is closed
            break
        seen += part
    assert (process.wait(), process.communicate()[1]) == (0, b"")
    shown = seen.decode()
    for text in ("rounds", "clients", "1/2", "accuracy 0.", "0:0", "test accuracy by level"):
        assert text in shown, text
    assert "round 1/2" not in shown  # plain lines are for files and pipes


@pytest.mark.slow
def test_the_demo_learns(incofl: Shell, tmp_path: Path) -> None:
    """Mean accuracy over the five levels on digits under Dirichlet 0.5, after 20 of its 50 rounds."""
    code, _, _ = incofl("run", "demo", "--set", "rounds=20", "--set", "eval.every=20", "--out", tmp_path, "--quiet")
    assert code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accuracy"] >= 0.8
    assert len(summary["accuracy_by_level"]) == 5


@pytest.mark.parametrize(
    ("what", "some"),
    [
        ("methods", ["fedavg", "heteroavg", "incoavg", "allsmall", "alllarge"]),
        ("models", ["resnet10", "resnet26", "tiny-mlp"]),
        ("datasets", ["digits", "fashion-mnist", "cifar10", "cinic10", "svhn"]),
        ("presets", ["demo", "paper-cifar10", "paper-cinic10", "paper-svhn"]),
    ],
)
def test_list(incofl: Shell, what: str, some: list[str]) -> None:
    code, out, err = incofl("list", what)
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert set(some) <= set(names)
    assert all(len(line.split(maxsplit=1)) == 2 for line in out.splitlines())


def processor_seconds(*command: str) -> float:
    """The processor time, user and system, of a command in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize("arguments", [["--help"], ["list", "methods"]], ids=" ".join)
def test_help_and_lists_answer_at_once(arguments: list[str]) -> None:
    """The aim is half a second; machines are noisy, so only a whole one is a failure."""
    seconds = min(processor_seconds("-m", "incofl", *arguments) for _ in range(2))
    print(f"incofl {' '.join(arguments)}: {seconds:.2f} s of processor time")
    assert seconds < 1


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list", "methods"]], ids=" ".join)
def test_help_and_lists_do_not_import_torch(arguments: list[str]) -> None:
    code = f"""
import sys
import tomllib
sys.argv = {["incofl", *arguments]!r}
from incofl.cli import main
try:
    main()
finally:
    heavy = {{"torch", "pydantic", "numpy", "rich.table", "scipy", "matplotlib"}} & sys.modules.keys()
    print(*sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_help(incofl: Shell) -> None:
    for arguments in ([], ["--help"]):
        code, out, err = incofl(*arguments)
        assert (code, err) == (0, "")
        assert all(command in out for command in ("run", "plan", "list"))
    code, out, _ = incofl("run", "--help")
    assert all(option in out for option in ("--method", "--set", "--out", "--resume", "--devices"))
    code, out, _ = incofl("--version")
    assert (code, out) == (0, "incofl 0.2.0\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--method", "incavg"], "method: got 'incavg'; did you mean 'incoavg'?"),
        (["run", "--method", "hetreoavg+inco"], "method: got 'hetreoavg+inco'; did you mean 'heteroavg'?"),
        (["run", "--method", "incoavg+trimed"], "got 'incoavg+trimed'; did you mean 'incoavg+trimmed'?"),
        (["run", "--set", "data.alpa=1"], "unknown key 'data.alpa'; did you mean 'data.alpha'?"),
        (["run", "--set", "data.name=cifar"], "data.name: got 'cifar'; did you mean 'cifar10'?"),
        (["run", "--set", "rounds=many"], "rounds: got 'many', expected a whole number >= 1"),
        (["run", "--rounds", "many"], "Invalid value for '--rounds': 'many' is not a whole number."),
        (["run", "--set", "data.alpha=0"], "data.alpha: got 0, expected a number > 0"),
        (["run", "--set", "data.clients=2000"], "data.clients: got 2000, expected at most 1442"),
        (["run", "--set", "cohort=21"], "cohort: got 21, expected at most data.clients = 20"),
        (["run", "--set", "split.levels=10"], "split.levels: got 10 levels, expected 1 to 9"),
        (["run", "--set", "split.kind=layer"], "split.levels: got 5 levels, expected 1 to 3"),
        (["run", "--set", "split.counts=[20]"], "split.counts: got 1 numbers, expected 5, one per level"),
        (
            ["run", "--set", "split.names=['a','b']"],
            "split.names: got ('a', 'b'), expected a name of its own for each of 5",
        ),
        (["run", "--set", "split.names=['a','b','c','best','e']"], "a name of its own for each of 5 levels, none of"),
        (["run", "--set", "data.name=cifar10"], "cifar10: no cifar-10-batches-bin/*_batch* or "),
        (["run", "--set", "data.name=fashion-mnist"], "fashion-mnist: no fashion-mnist/*-ubyte* or Fashion"),
        (["run", "nowhere.toml"], "nowhere.toml: no such file, nor a preset"),
        (["run", "--resume"], "--resume: got no --out"),
        (["run", "--resume", "--out", "typo"], "typo: holds no run to resume; check --out"),
        (["run", "--set", "split.levels=[]"], "split.levels: got an empty list"),
        (["run", "--set", "engine.device=toaster"], "engine.device: got 'toaster', expected a device of this machine"),
        (["run", "--set", "prox.mu=-1"], "prox.mu: got -1, expected a number >= 0"),
        (["run", "--set", "moon.projection=-1"], "moon.projection: got -1, expected a whole number from 0 to 65536"),
        (
            ["run", "--method", "reefl", "--set", "model.name=tiny-mlp"],
            "model.name: ResidualMlp cannot have a shared exit, expected a ViT or a model with a method",
        ),
        (
            ["run", "--method", "heterofl", "--set", "split.kind=stage"],
            "split.kind: got 'stage', expected 'hetero': heterofl splits by width",
        ),
        (["run", "--colour"], "No such option"),
        (["runn"], "No such command 'runn'"),
        (["list", "colours"], "'colours' is not one of"),
        (["plan", "--devices", "nowhere.toml"], "nowhere.toml: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = incofl(*arguments)
    assert code == 2
    assert message in err
    assert err.startswith("incofl: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize("damage", ["missing", "truncated", "corrupt"])
def test_damaged_data_files(incofl: Shell, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    if damage != "missing":
        content = b"\x1f\x8b\x08" + bytes(50) if damage == "corrupt" else b"\0\0\x08\x03"
        (folder / f"train-images-idx3-ubyte{'.gz' if damage == 'corrupt' else ''}").write_bytes(content)
    code, _, err = incofl(
        "run", "--set", "data.name=fashion-mnist", "--set", f"data.root={tmp_path}", "--out", tmp_path
    )
    assert (code, err.count("\n")) == (2, 1)
    assert ("fashion-mnist/*-ubyte*" if damage == "missing" else "train-images-idx3-ubyte") in err


def test_a_failed_start_can_be_repeated(incofl: Shell, tmp_path: Path) -> None:
    """A start that fails for want of data leaves nothing behind that would be in the way."""
    out = tmp_path / "r"
    assert incofl("run", "--set", "data.name=cifar10", "--set", f"data.root={tmp_path}", "--out", out)[0] == 2
    assert not out.exists()
    assert incofl("run", *SMALL, "--out", out)[0] == 0


def test_folders_of_other_runs(incofl: Shell, tmp_path: Path) -> None:
    assert incofl("run", *SMALL, "--out", tmp_path)[0] == 0
    code, _, err = incofl("run", *SMALL, "--out", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds this run already; continue it (--resume, or resume=True in Python)" in err
    code, _, err = incofl("run", *SMALL, "--set", "seed=3", "--out", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a run with another config (seed is 0 there, 3 here)" in err


@pytest.mark.parametrize("projection", [0, 16])
def test_moon_on_a_model_without_features(incofl: Shell, monkeypatch: pytest.MonkeyPatch, projection: int) -> None:
    """Its last layer is no linear one, so that there is nothing to take for features."""
    from torch import nn

    from incofl.layout import Layout
    from incofl.models import MODELS, Family

    def headless() -> tuple[nn.Module, Layout]:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.LogSoftmax(1))
        return model, Layout.of(model, {}, [["1"]], {})

    monkeypatch.setitem(MODELS, "headless", Family("for this test", headless))
    options = ["--set", "model.name=headless", "--set", "split.levels=1", "--set", f"moon.projection={projection}"]
    code, _, err = incofl("run", "--method", "heteromoon", *options)
    assert (code, err.count("\n")) == (2, 1)
    assert "method: moon needs a model whose last layer is linear; Sequential has another" in err


def test_scaffold_with_a_missing_client_file(incofl: Shell, tmp_path: Path) -> None:
    scaffold = [*SMALL, "--method", "heteroscaffold", "--out", tmp_path]
    assert incofl("run", *scaffold)[0] == 0
    victim = min((tmp_path / "checkpoint" / "clients").iterdir())
    victim.unlink()
    code, _, err = incofl("run", *scaffold, "--set", "rounds=3", "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{victim}: the memory of a client is missing (1 in all); the run cannot be continued without it" in err


def test_plan_counts_what_a_method_sends(incofl: Shell) -> None:
    """Scaffold's variate, four bytes a parameter, both ways."""
    plain, scaffold = (
        json.loads(incofl("plan", "--method", method, "--json")[1])["levels"]
        for method in ("heteroavg", "heteroscaffold")
    )
    for ours, theirs in zip(scaffold, plain, strict=True):
        for way in ("bytes_down", "bytes_up"):
            assert ours[way] - theirs[way] == 4 * ours["parameters"]
        assert ours["memory"] - theirs["memory"] == 8 * ours["parameters"]


@pytest.mark.parametrize(("words", "expected"), [("incofl re", ["report", "reproduce"]), ("incofl data v", ["verify"])])
def test_shell_completion(words: str, expected: list[str]) -> None:
    """What bash asks for when somebody presses Tab."""
    code = "import sys; sys.argv = ['incofl']; from incofl.cli import main; main()"
    asked = {"_INCOFL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected, done.stderr


def test_a_dry_run_checks_and_runs_nothing(incofl: Shell, tmp_path: Path) -> None:
    command = ("run", *SMALL, "--rounds", "7", "--seed", "3", "--out", tmp_path / "run")
    code, out, err = incofl(*command, "--dry-run")
    assert (code, err) == (0, "")
    assert "7 rounds, seed 3" in out
    assert f"nothing was run; the records would be in {tmp_path / 'run'}" in out
    assert not (tmp_path / "run").exists()
    code, out, _ = incofl(*command, "--print-config", "--root", "somewhere")
    assert code == 0
    config = tomllib.loads(out)
    assert (config["rounds"], config["seed"], config["data"]["root"]) == (7, 3, "somewhere")
    assert not (tmp_path / "run").exists()
    assert incofl("run", "--set", "data.name=cifar10", "--root", tmp_path, "--dry-run")[0] == 2  # it is not there
    assert "--rounds" in incofl("run", "--rounds", "0")[2]


def test_windows_is_refused_in_one_line(incofl: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    code, _, err = incofl("list", "methods")
    assert (code, err.count("\n")) == (2, 1)
    assert "use WSL" in err


def test_macos_is_said_to_be_untested(incofl: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, out, err = incofl("list", "methods")
    assert (code, err.count("\n")) == (0, 1)
    assert "macOS is not tested" in err
    assert "heteroavg" in out
