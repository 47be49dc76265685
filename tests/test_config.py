"""Configs: round trip, overrides, presets, and one clear line for each mistake."""

from pathlib import Path

import pytest

from incofl.config import load_config, make_config, presets
from incofl.engine.build import build_model, build_splitter, outline
from incofl.errors import IncoflError
from incofl.models import MODELS


def test_round_trip(tmp_path: Path) -> None:
    config = make_config(
        {"method": "incoavg"},
        ["inco.clip=none", "split.levels=[[1,1,1,1],[3,3,3,3]]", "split.counts=[5,15]", "cohort=3"],
    )
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert load_config(path) == config
    assert load_config(path).digest() == config.digest()
    assert config.methods["inco"].clip is None
    assert config.split.levels == ((1, 1, 1, 1), (3, 3, 3, 3))


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("seed = 1\n[data]\nalpha = 0.1\nclients = 7\n")
    config = load_config(path, ["data.alpha=0.3", "data.alpha=0.4"])
    assert (config.seed, config.data.alpha, config.data.clients) == (1, 0.4, 7)


def test_values_of_overrides() -> None:
    config = make_config(
        {}, ["method=HeteroAvg", "model.stem=imagenet", "local.drop_last=true", "local.lr=1e-2", "cohort=0.5"]
    )
    assert (config.method, config.model.stem, config.local.drop_last, config.local.lr) == (
        "heteroavg",
        "imagenet",
        True,
        0.01,
    )
    assert config.cohort_size == 10
    assert make_config({}, ["data.root=/some where/x"]).data.root == "/some where/x"


@pytest.mark.parametrize(("cohort", "size"), [("3", 3), ("0.1", 2), ("0.001", 1), ("20", 20), ("1", 1)])
def test_cohort_is_a_count_or_a_ratio(cohort: str, size: int) -> None:
    assert make_config({}, [f"cohort={cohort}"]).cohort_size == size


def test_model_options_follow_the_data_unless_given() -> None:
    assert (make_config().model.width, make_config().model.stem) == (0.25, "small")
    cifar = make_config({}, ["data.name=cifar10"]).model
    assert (cifar.width, cifar.stem) == (1.0, "imagenet")
    chosen = make_config({}, ["data.name=cifar10", "model.width=0.5", "model.stem=small"]).model
    assert (chosen.width, chosen.stem) == (0.5, "small")


def test_digest_leaves_out_what_cannot_change_results() -> None:
    base = make_config().digest()
    assert make_config({}, ["rounds=99", "data.root=elsewhere", "engine.workers=1"]).digest() == base
    for change in ("seed=1", "data.alpha=0.6", "method=heteroavg", "anchor.every=2", "buffers=average", "local.lr=0.1"):
        assert make_config({}, [change]).digest() != base


def test_options_of_a_part_that_the_method_does_not_have_are_said(tmp_path: Path) -> None:
    """Not those of a file for several methods, of which one is chosen apart from it, nor what a comparison needs."""
    said = make_config({"method": "heteroavg"}, ["inco.eps=1e-6", "anchor.every=2", "local.lr=0.1"])
    assert said.unused == ("anchor", "inco")
    assert outline(said).notes[-1] == "[inco] has no effect: heteroavg has no such part"
    assert make_config({"method": "incoavg"}, ["inco.eps=1e-6"]).unused == ()
    path = tmp_path / "both.toml"
    path.write_text('method = "incoavg"\n[inco]\neps = 1e-6\n')
    assert make_config(path, ["method=heteroavg"]).unused == ()
    assert make_config(path, method="heteroavg").unused == ()
    assert make_config(path, ["method=heteroavg", "anchor.every=2"]).unused == ("anchor",)
    assert make_config({"method": "heteroavg", "inco": {}}, also=["incoavg"]).unused == ()
    assert "unused" not in said.to_toml()
    assert make_config(said).unused == ("anchor", "inco")  # as a run resolves it
    assert make_config(said, method="incoavg").unused == ("anchor",)


def test_presets_are_valid_and_the_papers_average_buffers() -> None:
    for name in presets():
        config = load_config(name)
        if name.startswith("paper"):
            assert config.buffers == "average"
            rounds = 200 if "vit" in name else 500
            assert (config.data.clients, config.cohort_size, config.rounds) == (100, 10, rounds)
            assert config.model.width == 1.0
            assert (config.methods["inco"].guard_zero_reference, config.local.drop_last) == (False, True)
    assert load_config("demo") == make_config()


@pytest.mark.parametrize("model", [name for name, family in MODELS.items() if family.input == "images"])
def test_the_default_number_of_levels_fits_the_model(model: str) -> None:
    config = make_config({"model": {"name": model, "width": 0.05 if model.startswith("resnet") else 1.0}})
    splitter = build_splitter(config, build_model(config))
    assert len(splitter.depths) == {"resnet10": 1, "resnet14": 3, "tiny-resnet": 3, "tiny-vit": 3}.get(model, 5)


BAD = {
    "method=incavg": "method: got 'incavg'; did you mean 'incoavg'?",
    "data.alpa=1": "config: unknown key 'data.alpa'; did you mean 'data.alpha'?",
    "aggregate.server_lr=0.5": "config: unknown key 'aggregate.server_lr'; did you mean 'server.lr'?",
    "heterofl.clip=1": "config: unknown key 'heterofl.clip'; did you mean 'local.max_grad_norm'?",
    "aggregate=3": "aggregate: got 3, expected a table such as [aggregate]",
    "method=fedavg+inco": "method: got 'fedavg+inco', expected one server model for all sizes",
    "method=incoavg+inco": "method: two transforms of incoavg+inco have the name 'inco', expected one of each",
    "method=incoavg+inko": "method: got 'incoavg+inko'; expected one of: adam, ",
    "sed=1": "config: unknown key 'sed'; did you mean 'seed'?",
    "data.name=cifra10": "data.name: got 'cifra10'; did you mean 'cifar10'?",
    "model.name=resnet27": "model.name: got 'resnet27'; did you mean 'resnet26'?",
    "rounds=many": "rounds: got 'many', expected a whole number >= 1",
    "rounds=1.5": "rounds: got 1.5, expected a whole number >= 1",
    "rounds=0": "rounds: got 0, expected a whole number >= 1",
    "seed=-1": "seed: got -1, expected a whole number >= 0",
    "data.alpha=0": "data.alpha: got 0, expected a number > 0",
    "data.alpha=-0.5": "data.alpha: got -0.5, expected a number > 0",
    "data.alpha=nan": "data.alpha: got nan, expected a number > 0",
    "data.alpha=inf": "data.alpha: got inf, expected a number > 0 and <= 1e+06",
    "cohort=inf": "cohort: got inf, expected a whole number >= 1 or a number > 0 and < 1",
    "cohort=1.0": "cohort: got 1.0, expected a whole number >= 1 or a number > 0 and < 1",
    "alpha=1": "config: unknown key 'alpha'; did you mean 'data.alpha'?",
    "record.trackers=wandb": "record.trackers: got 'wandb', expected a list of tensorboard, wandb, mlflow, such as [",
    "lcoal.epoch=1": "config: unknown key 'lcoal.epoch'; did you mean 'local.epochs'?",
    "lcoal.xyz=1": "config: unknown key 'lcoal'; did you mean 'local'?",
    "epoch=1": "config: unknown key 'epoch'; did you mean 'local.epochs'?",
    "lr=1": "config: unknown key 'lr'; did you mean 'local.lr'?",
    "local.batch_size=1000000000000": "local.batch_size: got 1000000000000, expected a whole number >= 2",
    "data.clients=0": "data.clients: got 0, expected a whole number from 1 to 1e+08",
    "data.partition=random": "data.partition: got 'random', expected 'iid' or 'dirichlet'",
    "data=3": "data: got 3, expected a table such as [data]",
    "seed.x=3": "seed: got {'x': 3}, expected a whole number >= 0",
    "cohort=21": "cohort: got 21, expected at most data.clients = 20: set cohort, as a number or",
    "cohort=2.5": "cohort: got 2.5, expected a whole number >= 1 or a number > 0 and < 1",
    "cohort=0": "cohort: got 0, expected a whole number >= 1 or a number > 0 and < 1",
    "buffers=mean": "buffers: got 'mean', expected 'average' or 'per-level'",
    "local.lr=fast": "local.lr: got 'fast', expected a number",
    "local.lr=0": "local.lr: got 0, expected a number > 0",
    "local.drop_last=1": "local.drop_last: got 1, expected true or false",
    "inco.rule=code": "inco.rule: got 'code', expected 'released' or 'algorithm1' or 'theorem'",
    "inco.theta_max=0": "inco.theta_max: got 0, expected a number > 0 or 'none'",
    "split.counts=[1,2]": "split.counts: got 3 clients, expected data.clients = 20",
    "split.levels=0": "split.levels: got 0, expected a whole number >= 1 or a list",
    "split.levels=['a']": "split.levels: got ['a'], expected a whole number >= 1 or a list",
    "engine.workers=0": "engine.workers: got 0, expected a whole number >= 1 or 'auto'",
    "model.width=0": "model.width: got 0, expected a number > 0 and <= 4 or 'none'",
    "seed=1 seed.x=3": "config: 'seed.x' is not a key: 'seed' is a value, not a table",
    "alpha": "config: got 'alpha', expected key=value such as data.alpha=0.5",
    "when=2020-01-01": "config: unknown key 'when'",
}


@pytest.mark.parametrize("override", BAD)
def test_mistakes(override: str) -> None:
    with pytest.raises(IncoflError) as problem:
        make_config({}, override.split(" "))
    assert str(problem.value).startswith(BAD[override])
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"seed = ", "not a TOML file"), (b"\xff\xfe", "not a TOML file"), (None, "no such file, nor a preset")],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(IncoflError, match=message):
        load_config(path)
    with pytest.raises(IncoflError, match="did you mean 'paper-cifar10'"):
        load_config("paper-cifar")


def test_a_date_is_taken_as_it_is_written() -> None:
    """TOML would make it a date; a folder may be called so, a number of rounds may not."""
    assert make_config({}, ["data.root=2020-01-01"]).data.root == "2020-01-01"
    with pytest.raises(IncoflError, match="rounds: got '2020-01-01', expected a whole number"):
        make_config({}, ["rounds=2020-01-01"])
