"""Crashes, full disks and flipped bits: a run goes on bit for bit, or says in one line why it cannot."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import incofl
from incofl.analysis.runs import RecordedRun
from incofl.engine import files
from incofl.engine.files import PRIVATE, append_line, atomic_write, read_header, read_sealed, write_sealed
from incofl.engine.progress import Progress
from incofl.engine.run_folder import RunFolder
from incofl.errors import RunError
from incofl.report.live import state
from incofl.studies.reproduce import is_finished
from tests.engine.test_run import comparable, final_state
from tests.federations import tiny_config
from tests.torture import torture

KEYS = ("model.name=tiny-mlp", "data.limit=80", "method=heteroscaffold", "eval.limit=20")


def run(folder: Path, rounds: int = 3, resume: bool = True, progress: Any = False) -> None:
    incofl.run(tiny_config(*KEYS, f"rounds={rounds}"), folder, resume=resume, progress=progress)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


class Killed(BaseException):
    """What no code expects."""


class Faulty:
    """A file layer that writes half of the so-many-th piece and then fails, or ends everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, problem: BaseException) -> None:
        self.calls, self.at, self.problem, self._put = 0, at, problem, files.put
        monkeypatch.setattr(files, "put", self)

    def __call__(self, file: int, content: bytes | memoryview) -> None:
        self.calls += 1
        if self.calls >= self.at:
            self._put(file, content[: len(content) // 2])
            raise self.problem
        self._put(file, content)


def number_of_writes(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        counted = Faulty(patch, 10**9, Killed())
        run(folder, rounds=2)
        return counted.calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "full disk", "full disk without links"])
def test_a_torn_write_anywhere_loses_nothing(
    kind: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of two rounds in turn is the last one, and only half of it is done."""
    if "links" in kind:
        monkeypatch.setattr(os, "link", lambda *names: os.stat("/no/such/file"))
    writes = number_of_writes(tmp_path / "counted")
    assert writes > 20
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for at in range(1, writes + 1):
        folder, problem = tmp_path / f"cut-{at}", full if "full" in kind else Killed()
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, at, problem)
            expected = pytest.raises(RunError, match="cannot be written") if "full" in kind else pytest.raises(Killed)
            with expected:
                run(folder, rounds=2)
        run(folder)
        assert final_state(folder) == final_state(whole), at
        assert comparable(folder) == comparable(whole), at
        shutil.rmtree(folder)


def test_a_full_disk_is_said_in_one_line_and_leaves_no_half_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Faulty(patch, 25, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(
            RunError, match=r"cannot be written \(No space left on device\); what was saved before is whole"
        ):
            run(tmp_path / "full")
    assert not list(tmp_path.rglob("*.part"))
    run(tmp_path / "full")


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, line: str) -> None:
        self.lines.append(line)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", ["torn", "empty", "a bit of a weight", "a bit of the header", "garbage"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(damage: str, finished: Path, whole: Path) -> None:
    checkpoint = RunFolder(finished).checkpoint
    raw = checkpoint.read_bytes()
    if "bit" in damage:
        flip(checkpoint, len(raw) // 2 if "weight" in damage else 100)
    else:
        checkpoint.write_bytes({"torn": raw[:-100], "empty": b"", "garbage": b"x" * 1000}[damage])
    heard = Heard()
    run(finished, progress=heard)
    (line,) = heard.lines
    assert "state.safetensors: damaged (" in line
    assert line.endswith("continued from the checkpoint before it, round 2")
    assert final_state(finished) == final_state(whole)
    assert comparable(finished) == comparable(whole)


def test_damage_of_both_checkpoints_is_one_line(finished: Path) -> None:
    for path in (finished / "checkpoint").glob("*.safetensors"):
        flip(path, -5)
    with pytest.raises(RunError, match=r"state.safetensors: damaged \(its checksum is wrong: .*restore the file"):
        run(finished)


@pytest.mark.parametrize("line", [0, 2])
@pytest.mark.parametrize(("old", "new"), [('"loss": ', '"loss": 1'), ('{"round"', '{"rounb"'), ("{", "\\xff")])
def test_altered_records_are_noticed(line: int, old: str, new: str, finished: Path, whole: Path) -> None:
    """The last line is computed again from the checkpoint before it; of an earlier one, nothing is left."""
    metrics = finished / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[line] = lines[line].replace(old, new, 1)
    metrics.write_text("".join(lines))
    if line == 2:
        run(finished)
        assert comparable(finished) == comparable(whole)
    else:
        with pytest.raises(RunError, match=r"metrics.jsonl: damaged \(line 1 was altered\)"):
            run(finished)


@pytest.mark.parametrize("line", ["12", "{}", "[]", "null", '{"round": 1}', "[" * 100000, '"x', "\ud800"])
def test_a_line_that_is_no_row_is_refused_by_all_who_read_it(line: str, finished: Path) -> None:
    metrics = finished / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines()
    metrics.write_text("\n".join([first, line, *others]) + "\n", errors="surrogatepass")
    with pytest.raises(RunError, match=r"metrics.jsonl: damaged \("):
        RecordedRun(finished)
    with pytest.raises(RunError, match=r"metrics.jsonl: damaged \("):
        run(finished)


@pytest.mark.parametrize("content", ["", "[1]", "{", "12", "[" * 100000])
def test_a_damaged_environment_is_one_line(content: str, finished: Path) -> None:
    (finished / "environment.json").write_text(content)
    with pytest.raises(RunError, match=r"environment.json: damaged \(.*; delete it"):
        run(finished, rounds=4)
    (finished / "environment.json").unlink()
    run(finished, rounds=4)


def test_an_altered_partition_is_noticed(finished: Path) -> None:
    parts = json.loads((finished / "partition.json").read_text())
    parts[0][0], parts[1][0] = parts[1][0], parts[0][0]
    (finished / "partition.json").write_text(json.dumps(parts))
    with pytest.raises(RunError, match="checkpoint of another partition"):
        run(finished)


def test_a_damaged_memory_of_a_client_is_one_line(finished: Path) -> None:
    for path in (finished / "checkpoint" / "clients").iterdir():
        flip(path, -3)
    with pytest.raises(RunError, match=r"damaged \(its checksum is wrong.*\): the memory of client \d+ cannot be read"):
        run(finished, rounds=6)


def test_a_damaged_memory_of_the_last_round_is_noticed_and_the_round_before_is_used(
    finished: Path, whole: Path
) -> None:
    for path in (finished / "checkpoint" / "clients").glob("*-round-2.safetensors"):  # of three
        flip(path, -3)
    heard = Heard()
    run(finished, progress=heard)
    (line,) = heard.lines
    assert line.endswith("continued from the checkpoint before it, round 2")
    assert final_state(finished) == final_state(whole)
    assert comparable(finished) == comparable(whole)


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100000])
def test_a_damaged_summary_is_one_line_for_all_who_read_it(content: str, finished: Path) -> None:
    (finished / "summary.json").write_text(content)
    for read in (state, lambda folder: is_finished(folder, tiny_config(*KEYS))):
        with pytest.raises(RunError, match=r"summary.json: damaged \(.*; delete it"):
            read(finished)


def test_a_kill_before_anything_but_the_folder_is_there(tmp_path: Path, whole: Path) -> None:
    """Folders that earlier versions left behind, too: an empty file of records and no config."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / ".lock").write_text("")
    run(tmp_path / "run")
    assert comparable(tmp_path / "run") == comparable(whole)


def test_sealed_files(tmp_path: Path) -> None:
    """Any flipped bit of the file, wherever it is, is noticed; types and headers come back."""
    path, tensors = tmp_path / "a.safetensors", {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    write_sealed(path, tensors, {"round": 7}, mode=PRIVATE)
    assert path.stat().st_mode & 0o777 == 0o600
    found, header = read_sealed(path)
    assert header["round"] == read_header(path)["round"] == 7
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)
    raw = path.read_bytes()
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(RunError, match="damaged"):
            read_sealed(path)


def test_what_is_written_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is synced before it gets its name, and the folder, which holds the name, after that; lines at once."""
    done, sync, replace = list[str](), os.fsync, Path.replace

    def noted_sync(file: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        sync(file)

    def noted_replace(path: Path, target: Path) -> Path:
        done.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    atomic_write(tmp_path / "a", b"one")
    assert done == ["file", "name", "folder"]
    append_line(tmp_path / "a", "two")
    assert done == ["file", "name", "folder", "file"]


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    assert "3 kills" in torture(tmp_path, kills=3, seed=1)
