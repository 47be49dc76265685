"""Client memory: in memory, on disk, and through crashes."""

import dataclasses
from pathlib import Path

import pytest
import torch

import incofl
from incofl.engine.federation import Federation
from incofl.engine.store import ClientStore
from incofl.errors import RunError
from incofl.split import Splitter
from incofl.tensors import Tensors
from tests.federations import tiny_config, tiny_federation


@pytest.fixture(scope="module")
def federation() -> Federation:
    return tiny_federation("method=heteroscaffold")


def memory(federation: Federation, level: int, value: float) -> Tensors:
    shapes = federation.slice(level, 0).shapes
    return {
        name: torch.full(shape, value) for name, shape in shapes.items() if name in federation.model.layout.parameters
    }


def value_of(store: ClientStore, federation: Federation, client: int, level: int) -> float | None:
    found = store.get(client, federation.slice(level, 0))
    return float(found["fc.bias"][0]) if found else None


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def test_a_client_remembers_its_last_turn(federation: Federation) -> None:
    store = ClientStore(federation)
    assert store.get(3, federation.slice(0, 0)) == {}
    made = memory(federation, 0, 1.0)
    store.put(3, 0, 0, made)
    made["fc.bias"].fill_(9)  # the store has a copy
    assert value_of(store, federation, 3, 0) == 1.0
    store.put(3, 0, 4, memory(federation, 0, 2.0))
    assert value_of(store, federation, 3, 0) == 2.0
    assert value_of(store, federation, 4, 0) is None


def test_beyond_the_limit_on_disk(federation: Federation, tmp_path: Path) -> None:
    store = ClientStore(federation, tmp_path, limit=1)
    for client in range(4):
        store.put(client, client % 3, 0, memory(federation, client % 3, float(client)))
    assert len(store._recent) == 1
    assert [value_of(store, federation, client, client % 3) for client in range(4)] == [0, 1, 2, 3]
    assert files(tmp_path) == {f"client-{client}-round-0.safetensors" for client in range(4)}


@pytest.mark.parametrize("crash", ["before the checkpoint", "after it"])
def test_a_crash_around_the_checkpoint(crash: str, federation: Federation, tmp_path: Path) -> None:
    """What the checkpoint names is what is there, whichever of the two it is; the rest is cleared away."""
    store = ClientStore(federation, tmp_path)
    store.put(1, 0, 0, memory(federation, 0, 1.0))
    store.saved()
    older = dict(store.manifest)
    store.put(1, 0, 1, memory(federation, 0, 2.0))
    store.put(2, 0, 1, memory(federation, 0, 3.0))
    assert files(tmp_path) == {f"client-{c}-round-{r}.safetensors" for c, r in ((1, 0), (1, 1), (2, 1))}
    again = ClientStore(federation, tmp_path)
    again.restore(older if crash == "before the checkpoint" else store.manifest)
    found = [value_of(again, federation, client, 0) for client in (1, 2)]
    if crash == "before the checkpoint":
        assert found == [1.0, None]
        assert files(tmp_path) == {"client-1-round-0.safetensors"}
    else:
        assert found == [2.0, 3.0]
        assert files(tmp_path) == {"client-1-round-1.safetensors", "client-2-round-1.safetensors"}
        with pytest.raises(RunError, match=r"client-1-round-0\.safetensors: the memory .* missing \(1 in all\)"):
            again.restore(older)


def test_old_memories_are_deleted_once_no_checkpoint_needs_them(federation: Federation, tmp_path: Path) -> None:
    """The last two checkpoints are kept, and a round that is taken back leaves what they need."""
    store, manifests = ClientStore(federation, tmp_path), []
    for round in range(3):
        store.put(1, 0, round, memory(federation, 0, float(round)))
        store.saved()
        manifests.append(dict(store.manifest))
    assert files(tmp_path) == {"client-1-round-1.safetensors", "client-1-round-2.safetensors"}
    store.put(1, 0, 3, memory(federation, 0, 3.0))
    store.restore(manifests[2])
    assert files(tmp_path) == {"client-1-round-1.safetensors", "client-1-round-2.safetensors"}
    again = ClientStore(federation, tmp_path)
    again.restore(manifests[2], manifests[1])
    assert files(tmp_path) == {"client-1-round-1.safetensors", "client-1-round-2.safetensors"}
    again.restore(manifests[1], {})
    assert value_of(again, federation, 1, 0) == 1.0
    assert files(tmp_path) == {"client-1-round-1.safetensors"}


def test_memories_are_in_the_servers_coordinates(federation: Federation) -> None:
    """A client that held channels 0 and 1 of four, and now holds 1 and 2, remembers 1; the other is 0."""
    layout = federation.model.layout
    splitter = Splitter((0.25,), (layout.depth,), "rolling")
    store = ClientStore(dataclasses.replace(federation, splitter=splitter))
    held, now = splitter.slice(layout, 0, 0), splitter.slice(layout, 0, 1)
    size = held.shapes["bn1.weight"][0]
    store.put(0, 0, 0, {"bn1.weight": torch.arange(1.0, size + 1)})
    seen = store.get(0, now)["bn1.weight"]
    assert seen.tolist() == [*range(2, size + 1), 0]
    assert store.get(0, splitter.slice(layout, 0, 0))["bn1.weight"].tolist() == list(range(1, size + 1))


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_missing_or_damaged_file_is_one_clear_line(damage: str, tmp_path: Path) -> None:
    settings = ["method=heteroscaffold", "data.clients=4", "engine.workers=1"]
    incofl.run(tiny_config(*settings, "rounds=1"), tmp_path)
    victim = sorted((tmp_path / "checkpoint" / "clients").iterdir())[0]
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:100])
    with pytest.raises(
        RunError, match=r"client-\d+-round-0.safetensors: .*the memory of .*(missing|cannot be read)"
    ) as line:
        incofl.run(tiny_config(*settings, "rounds=2"), tmp_path, resume=True)
    assert "\n" not in str(line.value)


def test_an_interruption_right_after_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While replaced memories are being deleted: the round counts, and the run goes on from it bit for bit."""
    settings = ["method=heteroscaffold", "data.clients=4", "rounds=3"]
    incofl.run(tiny_config(*settings), tmp_path / "whole")
    original, calls = ClientStore.saved, 0

    def interrupted(store: ClientStore) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        original(store)

    with monkeypatch.context() as patch:
        patch.setattr(ClientStore, "saved", interrupted)
        with pytest.raises(KeyboardInterrupt):
            incofl.run(tiny_config(*settings), tmp_path / "cut")
    assert (tmp_path / "cut" / "metrics.jsonl").read_text().count("\n") == 2
    incofl.run(tiny_config(*settings), tmp_path / "cut", resume=True)
    for name in ("state.safetensors", "clients"):
        a, b = (tmp_path / run / "checkpoint" / name for run in ("whole", "cut"))
        paths = sorted(a.iterdir()) if a.is_dir() else [a]
        for path in paths:
            assert path.read_bytes() == (b / path.name if a.is_dir() else b).read_bytes()
    assert files(tmp_path / "whole" / "checkpoint" / "clients") == files(tmp_path / "cut" / "checkpoint" / "clients")
