"""Runs: folder, records, interruption and resumption."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import incofl
from incofl.client import ClientRule, Local
from incofl.config import Config, load_config
from incofl.engine.backend import Backend
from incofl.engine.build import build
from incofl.engine.federation import Federation
from incofl.engine.run_folder import RunFolder
from incofl.errors import ConfigError, RunError
from incofl.tensors import Tensors
from tests.federations import tiny_config
from tests.texts import text_config, write_shakespeare


def final_state(folder: Path) -> bytes:
    return (folder / "checkpoint" / "state.safetensors").read_bytes()


def with_client(federation: Federation, rule: ClientRule) -> Federation:
    return dataclasses.replace(federation, method=dataclasses.replace(federation.method, client=rule))


def comparable(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_the_folder_holds_what_is_promised(tmp_path: Path) -> None:
    config = tiny_config("eval.every=2")
    summary = incofl.run(config, tmp_path / "r")
    folder = tmp_path / "r"
    assert load_config(folder / "config.toml") == config
    environment = json.loads((folder / "environment.json").read_text())
    assert {"incofl", "python", "torch", "commit"} <= environment.keys()
    parts = json.loads((folder / "partition.json").read_text())
    assert sorted(i for part in parts for i in part) == list(range(300))
    rows = comparable(folder)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert rows[0]["accuracy"] is None  # not evaluated
    assert rows[0]["accuracy_by_level"] is None
    for row in rows[1:]:  # every second round, and the last
        assert len(row["accuracy_by_level"]) == 3
        assert row["accuracy"] == pytest.approx(sum(row["accuracy_by_level"]) / 3)
    assert all(len(row["clients"]) == 4 and row["rejected"] == [] for row in rows)
    assert all(row["bytes_up"] > 0 and row["bytes_down"] > 0 and row["loss"] > 0 for row in rows)
    mixed = rows[0]["inco"]
    assert mixed
    assert all(
        {"theta", "beta_positive", "beta", "norm_deep", "norm_shallow"} <= entry.keys() for entry in mixed.values()
    )
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["status"] == "done"
    assert summary["accuracy"] == rows[-1]["accuracy"]
    assert not list(folder.rglob("*.part"))


def test_seeds_and_repetition(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        incofl.run(tiny_config(f"seed={seed}"), tmp_path / name)
    assert final_state(tmp_path / "a") == final_state(tmp_path / "b")
    assert comparable(tmp_path / "a") == comparable(tmp_path / "b")
    assert final_state(tmp_path / "a") != final_state(tmp_path / "c")


@pytest.mark.parametrize("method", ["incoavg", "fedavg"])
def test_a_run_can_be_prolonged(tmp_path: Path, method: str) -> None:
    incofl.run(tiny_config(f"method={method}", "rounds=4"), tmp_path / "whole")
    incofl.run(tiny_config(f"method={method}", "rounds=1"), tmp_path / "parts")
    incofl.run(tiny_config(f"method={method}", "rounds=4"), tmp_path / "parts", resume=True)
    assert final_state(tmp_path / "whole") == final_state(tmp_path / "parts")
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "parts")


def test_a_natural_partition_may_leave_groups_unused(tmp_path: Path) -> None:
    """Eight roles, of which the six with most to say are clients: the run is prolonged like any other."""
    with write_shakespeare(tmp_path, roles=8).open("a") as file:
        file.write(f"\nRole 7:\n{'my lord ' * 50}\n")
    for folder, rounds in (("whole", [2]), ("parts", [1, 2])):
        for last in rounds:
            incofl.run(text_config(tmp_path, "tiny-lstm", f"rounds={last}"), tmp_path / folder, resume=last > rounds[0])
    parts = json.loads((tmp_path / "parts" / "partition.json").read_text())
    assert sum(map(len, parts)) <= max(map(max, parts))  # some are left out
    assert final_state(tmp_path / "whole") == final_state(tmp_path / "parts")
    known = RunFolder(tmp_path / "parts").load_partition(clients=6)
    assert known is not None
    assert [part.tolist() for part in known] == parts


@dataclasses.dataclass(frozen=True)
class Boasting(ClientRule):
    """One client sends a finite update whose squares are not."""

    victim: tuple[int, ...]  # its labels

    def finish(self, local: Local, update: Tensors) -> tuple[Tensors, Tensors]:
        if local.given.labels is not None and tuple(local.given.labels.tolist()) == self.victim:
            for value in update.values():
                value.mul_(1e20 / float(value.abs().max()))
        return {}, {}


def test_a_huge_update_is_rejected_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    config = tiny_config("cohort=10", "rounds=2")
    labels = build(config).labels(3)
    assert labels is not None
    rule = Boasting(tuple(labels.tolist()))

    class Changed(Backend):
        def build(self, config: Config, folder: RunFolder) -> Federation:
            return with_client(super().build(config, folder), rule)

    assert incofl.run(config, tmp_path, backend=Changed())["rejected"] == 2
    for row in comparable(tmp_path):
        (refusal,) = row["rejected"]
        assert refusal["client"] == 3
        assert re.match("client 3: its update of '.*' has values up to 1.0e\\+20, expected a norm", refusal["reason"])
        assert row["accuracy"] > 0


class Crash(BaseException):
    """An end that no code expects, like Ctrl-C in an unusual place."""


@pytest.mark.parametrize("victim", ["save_checkpoint", "run_round", "write_json"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_crash_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, call: int
) -> None:
    """Before a round, between its record and its checkpoint, or while the summary is written."""
    import importlib

    module = importlib.import_module("incofl.engine.run")
    incofl.run(tiny_config(), tmp_path / "whole")
    original, calls = getattr(module, victim), 0

    def crash(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Crash
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, victim, crash)
        if victim == "write_json" and call == 2:
            incofl.run(tiny_config(), tmp_path / "cut")  # there is only one summary
        else:
            with pytest.raises(Crash):
                incofl.run(tiny_config(), tmp_path / "cut")
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accur')  # a line cut off in the middle
    incofl.run(tiny_config(), tmp_path / "cut", resume=True)
    assert final_state(tmp_path / "whole") == final_state(tmp_path / "cut")
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


COMMAND = [sys.executable, "-m", "incofl", "run"]
SMALL: list[str] = [
    *("--set", "data.clients=10", "--set", "data.limit=300", "--set", "cohort=4", "--set", "split.levels=3"),
    *("--set", "model.name=tiny-resnet", "--set", "local.epochs=1", "--set", "rounds=12"),
]


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.001)


@pytest.mark.slow
def test_sigkill_at_several_moments(tmp_path: Path) -> None:
    """A real process, killed without warning again and again; the final weights equal those of an undisturbed run."""
    subprocess.run(
        [*COMMAND, *SMALL, "--out", str(tmp_path / "whole"), "--quiet"], check=True, stdout=subprocess.DEVNULL
    )
    folder = tmp_path / "killed"
    kills = 0
    for lines, delay in ((0, 3.0), (1, 0.0), (3, 0.004), (5, 0.02), (8, 0.05), (10, 0.001)):
        process = subprocess.Popen(
            [*COMMAND, "demo", *SMALL, "--out", str(folder), "--resume"], stdout=subprocess.DEVNULL
        )
        wait_for_lines(folder / "metrics.jsonl", lines, process)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 4
    subprocess.run([*COMMAND, "--out", str(folder), "--resume"], check=True, stdout=subprocess.DEVNULL)
    assert final_state(folder) == final_state(tmp_path / "whole")
    assert comparable(folder) == comparable(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_ctrl_c_ends_cleanly_and_can_be_resumed(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    """A terminal sends Ctrl-C to the whole process group, worker processes included."""
    folder = tmp_path / "r"
    # Tests that run in the background inherit an ignored SIGINT, which a command in a terminal does not have.
    attentive = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import incofl.__main__"
    command = [
        sys.executable,
        "-c",
        attentive,
        "run",
        *SMALL,
        "--set",
        "rounds=400",
        "--set",
        f"engine.workers={workers}",
        "--out",
        str(folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    wait_for_lines(folder / "metrics.jsonl", 2, process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().count("\n") == 1
    assert "finished round(s) are saved, continue with: incofl run --resume --out" in errors.decode()
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    done = len(comparable(folder))
    finish = [*COMMAND, "--out", str(folder), "--resume", "--set", f"rounds={done + 1}"]
    subprocess.run(finish, check=True, stdout=subprocess.DEVNULL)
    assert len(comparable(folder)) == done + 1


class TestRefusals:
    def test_a_folder_with_another_config(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=1"), tmp_path)
        with pytest.raises(RunError, match=r"holds a run with another config \(seed is 0 there, 1 here\)"):
            incofl.run(tiny_config("rounds=1", "seed=1"), tmp_path, resume=True)

    def test_a_folder_with_the_same_run(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=1"), tmp_path)
        with pytest.raises(
            RunError, match=r"continue it \(--resume, or resume=True in Python\) or choose another folder"
        ):
            incofl.run(tiny_config("rounds=1"), tmp_path)

    def test_a_checkpoint_of_another_config(self, tmp_path: Path) -> None:
        for name, seed in (("a", 0), ("b", 1)):
            incofl.run(tiny_config("rounds=1", f"seed={seed}"), tmp_path / name)
        RunFolder(tmp_path / "a").checkpoint.replace(RunFolder(tmp_path / "b").checkpoint)
        with pytest.raises(RunError, match="checkpoint of another config"):
            incofl.run(tiny_config("seed=1"), tmp_path / "b", resume=True)

    def test_a_damaged_checkpoint(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=1"), tmp_path)
        checkpoint = RunFolder(tmp_path).checkpoint
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
        with pytest.raises(RunError, match=r"state.safetensors: damaged \(.*restore the file from a copy"):
            incofl.run(tiny_config(), tmp_path, resume=True)

    def test_other_data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from incofl.data import Data

        incofl.run(tiny_config("rounds=1"), tmp_path)
        monkeypatch.setattr(Data, "fingerprint", lambda self: "other")
        with pytest.raises(RunError, match="checkpoint of another data"):
            incofl.run(tiny_config(), tmp_path, resume=True)

    def test_a_damaged_partition(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=1"), tmp_path)
        (tmp_path / "partition.json").write_text("[[1, 2")
        with pytest.raises(RunError, match=r"partition.json: damaged"):
            incofl.run(tiny_config(), tmp_path, resume=True)

    @pytest.mark.parametrize(
        ("first", "message"),
        [
            (None, "not a partition among 10 clients"),  # one client less
            ([7, 7], "not a partition among 10 clients"),
            ([-1], "not a partition among 10 clients"),
            ([1.5], "not a partition among 10 clients"),
            ([True], "not a partition among 10 clients"),
            ([300], "names example 300, expected less than 300"),
        ],
    )
    def test_a_partition_of_other_clients_or_data(
        self, first: list[float] | None, message: str, tmp_path: Path
    ) -> None:
        incofl.run(tiny_config("rounds=1"), tmp_path)
        parts = [[] for _ in range(9)] if first is None else [first, *([] for _ in range(9))]
        (tmp_path / "partition.json").write_text(json.dumps(parts))
        with pytest.raises(RunError, match=message):
            incofl.run(tiny_config(), tmp_path, resume=True)

    def test_fewer_rounds_than_are_finished(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=2"), tmp_path)
        with pytest.raises(ConfigError, match="rounds: got 1, expected at least 2"):
            incofl.run(tiny_config("rounds=1"), tmp_path, resume=True)

    def test_records_that_lack_rounds(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=2"), tmp_path)
        (tmp_path / "metrics.jsonl").unlink()
        with pytest.raises(RunError, match="lacks rounds that the checkpoint has"):
            incofl.run(tiny_config(), tmp_path, resume=True)

    def test_records_without_a_config(self, tmp_path: Path) -> None:
        incofl.run(tiny_config("rounds=1"), tmp_path)
        (tmp_path / "config.toml").unlink()
        with pytest.raises(RunError, match=r"holds records but no config.toml"):
            incofl.run(tiny_config("rounds=1"), tmp_path)

    def test_two_processes_in_one_folder(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="another process is running in it"):
            incofl.run(tiny_config("rounds=1"), tmp_path)

    def test_a_config_put_together_by_hand(self, tmp_path: Path) -> None:
        """Each value is checked at once, and what concerns several of them when the run starts."""
        with pytest.raises(ConfigError, match="rounds: got 0, expected a whole number >= 1"):
            dataclasses.replace(tiny_config(), rounds=0)
        with pytest.raises(ConfigError, match=r"cohort: got 11, expected at most data\.clients = 10"):
            incofl.run(dataclasses.replace(tiny_config(), cohort=11), tmp_path)

    def test_a_device_that_is_not_there(self, tmp_path: Path) -> None:
        for device in ("cuda:7", "toaster", "meta"):
            with pytest.raises(ConfigError, match=f"engine.device: got '{device}'"):
                incofl.run(tiny_config(f"engine.device={device}"), tmp_path)
        assert not list(tmp_path.iterdir())  # a start that failed does not occupy the folder

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError, match="cannot be written"):
            incofl.run(tiny_config(), tmp_path / "file" / "run")


def test_provenance_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumption adds what it was computed with; one without a round to compute adds nothing."""
    import incofl.engine.run_folder as records

    for rounds, commit in ((1, "first"), (1, "idle"), (2, "second")):
        monkeypatch.setattr(records, "environment", lambda commit=commit: {"commit": commit})
        incofl.run(tiny_config(f"rounds={rounds}"), tmp_path, resume=True)
    known = json.loads((tmp_path / "environment.json").read_text())
    assert known == {"commit": "first", "resumed": [{"commit": "second"}]}


def test_a_diverging_run_writes_valid_json(tmp_path: Path) -> None:
    overrides = ("local.optimizer=sgd", "local.lr=1e30", "rounds=1")
    with pytest.raises(RunError, match=r"nothing was accepted in 1 round\(s\), .*: client 0: .* lower local.lr"):
        incofl.run(tiny_config(*overrides), tmp_path)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    reasons = [refusal["reason"] for refusal in row["rejected"]]
    assert len(reasons) == 4
    assert all("the training diverged, lower local.lr" in reason for reason in reasons)
    assert sum("its update is not finite" in reason for reason in reasons) == 3  # one client makes a single step


def test_it_learns(tmp_path: Path) -> None:
    """Three sizes of a tiny network reach far more than chance within some rounds."""
    overrides = ("model.name=tiny-mlp", "split.kind=layer", "local.lr=0.005", "local.epochs=5", "data.limit=none")
    assert incofl.run(tiny_config(*overrides, "rounds=8", "eval.every=8"), tmp_path)["accuracy"] > 0.6
