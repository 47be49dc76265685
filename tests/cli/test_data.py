"""``incofl data`` end to end."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from incofl.data import DATASETS, Data, Examples
from incofl.data.pictures import draw, mosaic
from incofl.data.pipeline import Tokens
from tests.hub import serve_small_svhn
from tests.shell import Shell


def test_list(incofl: Shell, tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "train_32x32.mat").touch()
    code, out, err = incofl("data", "list", "--root", tmp_path)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.split() and line.split()[0] in DATASETS}
    assert set(rows) == set(DATASETS)
    assert "embedded" in rows["digits"]
    assert "not found" in rows["cifar10"]
    assert "73,257   26,032   found" in rows["svhn"]
    assert "not found" in rows["imdb"]
    (tmp_path / "imdb.safetensors").touch()
    _, out, _ = incofl("data", "list", "--root", tmp_path)
    assert [line.split()[3] for line in out.splitlines() if line.split()[:1] == ["imdb"]] == ["found"]


def test_show(incofl: Shell, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "digits.png"
    code, out, err = incofl("data", "show", "digits", "--set", "data.clients=7", "--set", "seed=3", "-o", picture)
    assert (code, err) == (0, "")
    for text in (
        "digits: 1,442 training and 355 test examples, 10 classes",
        "a model sees 1 x 8 x 8; pipeline: ImagePipeline(maximum=16, mean=(0.3048,), std=(0.3758,))",
        "dirichlet alpha 0.5, 7 clients with ",
        "seed 3",
    ):
        assert text in out
    counts = [line.split() for line in out.splitlines() if line.split()[:1] == ["3"]]
    assert counts == [["3", "3", "147", "36"]]
    with Image.open(picture) as image:
        assert min(image.size) > 400


def test_show_says_what_a_larger_model_sees(incofl: Shell) -> None:
    code, out, _ = incofl("data", "show", "digits", "--set", "data.side=16", "--set", "data.partition=iid")
    assert code == 0
    assert (
        "a model sees 1 x 16 x 16; pipeline: ImagePipeline(maximum=16, mean=(0.3048,), std=(0.3758,), resize=16)" in out
    )
    assert "iid, 20 clients with 72 to 73 examples" in out


def test_show_a_virtual_population(incofl: Shell, tmp_path: Path) -> None:
    options = ["--set", "data.partition=virtual", "--set", "data.clients=1000000", "--set", "data.examples=8"]
    code, out, _ = incofl("data", "show", "digits", *options, "-o", tmp_path / "p.png")
    assert code == 0
    assert "1,000,000 clients with 8 to 8 examples" in out


def test_fetch_verify_and_show(incofl: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_small_svhn(monkeypatch)
    code, out, err = incofl("data", "fetch", "svhn", "--root", tmp_path)
    assert (code, err) == (0, "")
    path = tmp_path / "svhn.safetensors"
    assert out == f"fetching https://huggingface.co/datasets/ufldl-stanford/svhn\nwrote {path}\n"
    code, out, err = incofl("data", "verify", "svhn", "--root", tmp_path)
    assert (code, err) == (0, "")
    assert "40, 4 of each class" in out
    code, out, err = incofl("data", "show", "svhn", "--root", tmp_path, "--set", "data.clients=2")
    assert (code, err) == (0, "")
    assert "svhn: 40 training and 20 test examples, 10 classes" in out
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, out, err = incofl("data", "verify", "svhn", "--root", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "svhn: not as published: svhn.safetensors; fetch it again" in err
    assert "not as fetched from https://huggingface.co" in out


def test_embedded_data_need_no_files(incofl: Shell) -> None:
    assert incofl("data", "fetch", "digits") == (0, "digits is embedded: there is nothing to fetch\n", "")
    code, out, err = incofl("data", "verify", "digits")
    assert (code, err) == (0, "")
    assert "by class 143 146" in out


def test_help(incofl: Shell) -> None:
    for arguments in (["data"], ["data", "--help"]):
        code, out, err = incofl(*arguments)
        assert (code, err) == (0, "")
        assert all(command in out for command in ("list", "show", "fetch", "verify"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "svnh"], "data.name: got 'svnh'; did you mean 'svhn'?"),
        (["show", "svhn"], "svhn: no svhn/*_32x32.mat or train_32x32.mat or test_32x32.mat in"),
        (["show", "digits", "-o", "picture"], "--out: got 'picture', expected a file that ends in .png"),
        (["show", "digits", "--set", "data.alpha=0"], "data.alpha: got 0, expected a number > 0"),
        (["show", "digits", "-o", "p.png"], "--out: needs matplotlib; try: pip install 'incofl[analysis]'"),
        (["verify", "cinic10"], "cinic10: no cinic-10/*/airplane or "),
        (["verify", "mnist"], "mnist: no mnist/*-ubyte* or MNIST/raw/*-ubyte* in"),
        (["fetch", "cifar"], "data.name: got 'cifar'; did you mean 'cifar10'?"),
        (["fetch", "cifar10"], "cifar10: needs datasets; try: pip install 'incofl[hub]'\n"),
        (["fetsch"], "No such command 'fetsch'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    incofl: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "incofl.data.pictures", raising=False)
    for package in ("datasets", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, package, None)  # as if they were not installed
    code, out, err = incofl("data", *arguments)
    assert code == 2
    assert list(tmp_path.iterdir()) == []
    assert message in err
    assert err.startswith("incofl: ")
    assert err.count("\n") == 1
    assert out == ""


def test_samples_stand_in_the_row_of_their_class() -> None:
    source = DATASETS["digits"]
    train, test = source.load(Path())
    tiles = mosaic(Data(train, test, classes=10, pipeline=source.view(None).pipeline))
    assert tiles.shape == (90, 72, 3)
    assert isinstance(train.x, torch.Tensor)
    first_three = train.x[train.y == 3][0, 0].numpy() / 16
    assert (tiles[27:35, :8, 1] == first_three).all()
    assert (tiles[8::9] == 1).all()  # white between the rows


def test_a_picture_of_texts_has_sizes_only() -> None:
    texts = Examples(torch.zeros(30, 5), torch.zeros(30, 5))
    parts = [torch.arange(10), torch.arange(10, 30)]
    figure = draw(Data(texts, texts, classes=50, pipeline=Tokens()), parts, [], "texts")
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [10, 20]  # type: ignore[attr-defined]
