"""Text data sets in their original formats, written by the tests; and every way in which the files can be wrong."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from incofl.data import Data, find_source
from incofl.data.partition import VirtualPartition, make_partition, natural_partition
from incofl.data.texts import CHARACTERS, encode, halves_of_reviews, speeches, word_examples
from incofl.errors import DataError
from tests.sources import load_dataset
from tests.texts import write_imdb, write_shakespeare, write_sst2


def load(name: str, root: Path) -> Data:
    return load_dataset(name, root)


def decode(tokens: torch.Tensor) -> str:
    return "".join("?" if token == 0 else CHARACTERS[token - 1] for token in tokens.flatten().tolist())


class TestShakespeare:
    def test_windows_by_hand(self, tmp_path: Path) -> None:
        """A role of 10 windows, 8 of them to train on; one too short; an empty speech; windows continue each other."""
        said = "".join(chr(ord("a") + i % 26) for i in range(400))
        text = f"A:\n{said}\n\nB:\nToo short.\n\nC:\n\nA:\n{said}\nthe end\n"
        (tmp_path / "shakespeare.txt").write_text(text)
        data = load("shakespeare", tmp_path)
        whole = f"{said}\n{said}\nthe end"
        assert decode(data.train.x) == whole[:640]
        assert decode(data.train.y) == whole[1:641]
        assert decode(data.test.x) == whole[640:800]
        assert decode(data.test.y) == whole[641:801]
        assert data.train.x.shape == (8, 80)
        assert data.train.x.dtype == data.train.y.dtype == torch.uint8
        for part in (data.train, data.test):
            assert part.groups is not None
            assert part.groups.tolist() == [0] * len(part)

    def test_a_role_with_one_window_to_train_on_is_left_out(self, tmp_path: Path) -> None:
        """81 characters make one window, 161 two; 401 five, of which one is tested on."""
        for length, windows in ((81, 0), (160, 0), (161, 2), (401, 4)):
            (tmp_path / "shakespeare.txt").write_text(f"A:\n{'x' * 500}\n\nB:\n{'y' * length}\n")
            groups = load("shakespeare", tmp_path).train.groups
            assert groups is not None
            assert int((groups == 1).sum()) == windows

    def test_one_client_per_role(self, tmp_path: Path) -> None:
        write_shakespeare(tmp_path, roles=8)
        data = load("shakespeare", tmp_path)
        assert data.train.groups is not None
        parts = natural_partition(data.train.groups, 8, rng())
        for part in parts:
            assert len(set(data.train.groups[part].tolist())) == 1
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(data.train)))

    @pytest.mark.parametrize("name", ["tinyshakespeare.txt", "shakespeare.txt", "shakespeare/input.txt"])
    def test_all_its_names(self, tmp_path: Path, name: str) -> None:
        path = write_shakespeare(tmp_path)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path.rename(tmp_path / name)
        assert len(load("shakespeare", tmp_path).train) > 0

    def test_vocabulary(self) -> None:
        """Newline 1, space 2, tilde last; whatever else is unknown."""
        assert 1 + len(CHARACTERS) == 97
        assert find_source("shakespeare").vocabulary == find_source("shakespeare").classes == 97
        assert encode("\n ~é\t\U0001f600").tolist() == [1, 2, 96, 0, 0, 0]

    def test_line_ends_of_windows_and_colons_in_speeches(self) -> None:
        assert speeches("A:\r\nHear: me.\r\n\r\nB:\r\nYes.\r\n") == {"A": "Hear: me.", "B": "Yes."}

    def test_no_class_per_example(self, tmp_path: Path) -> None:
        write_shakespeare(tmp_path)
        labels = load("shakespeare", tmp_path).train.y
        with pytest.raises(DataError, match=r"got 'dirichlet', expected 'natural' or 'iid'"):
            make_partition(labels, 2, "dirichlet", 0.5, rng())
        with pytest.raises(DataError, match=r"got 'virtual', expected 'natural' or 'iid'"):
            VirtualPartition(labels, 2, 0.5, 10, lambda client: rng())

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "shakespeare: no tinyshakespeare.txt or shakespeare.txt or .* in .*; set data.root"),
            (b"", "0 characters, expected a role with 401 or more; the file is truncated"),
            (b"A:\nshort\n", "9 characters, expected a role with 401 or more"),
            (
                b"A:\nhear\n\nOnce upon a time\nthere was",
                "got 'Once upon a time' near line 4, expected a role and a colon",
            ),
            (b"A:\n\xff\xfe", r"not a readable text in UTF-8 \(.*byte 0xff in position 3: invalid start byte\)"),
        ],
    )
    def test_refused(self, tmp_path: Path, content: bytes | None, words: str) -> None:
        if content is not None:
            (tmp_path / "tinyshakespeare.txt").write_bytes(content)
        with pytest.raises(DataError, match=words) as problem:
            load("shakespeare", tmp_path)
        assert "\n" not in str(problem.value)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def tokenize(train: list[str], test: list[str], length: int) -> list[torch.Tensor]:
    source = dataclasses.replace(find_source("sst2"), shape=(length,))
    return [part.x for part in word_examples(source, [(text, 0) for text in train], [(text, 1) for text in test])]


class TestTokenizer:
    def test_by_hand(self) -> None:
        """The 4 twice, then b, c, ! once each in the order of their characters; z is unknown."""
        train, test = tokenize(["The b", "the C!"], ["z the don't b"], 3)
        assert train.tolist() == [[2, 4, 0], [2, 5, 3]]
        assert test.tolist() == [[1, 2, 1]]
        assert train.dtype == torch.int16

    def test_words_of_the_test_set_are_not_learnt(self) -> None:
        _, test = tokenize(["a"], ["b b b b a"], 5)
        assert test.tolist() == [[1, 1, 1, 1, 2]]

    def test_the_most_frequent_words(self) -> None:
        """Of 9,000 words the 8,190 most frequent: the last ones of the alphabet of those seen once stay unknown."""
        words = [f"w{i:04}" for i in range(9000)]
        train, _ = tokenize([" ".join(words), "w8999"], ["w0000 w8188 w8189 w8999"], 9000)
        assert int(train.max()) == 8191
        assert train[0, :8190].tolist() == [*range(3, 8192), 1]
        assert train[1, 0] == 2

    def test_empty_texts(self) -> None:
        train, test = tokenize(["", "a"], [""], 2)
        assert train.tolist() == [[0, 0], [2, 0]]
        assert test.tolist() == [[0, 0]]


class TestSst2:
    def test_as_glue_has_it(self, tmp_path: Path) -> None:
        write_sst2(tmp_path, 60)
        data = load("sst2", tmp_path)
        assert data.train.x.shape == data.test.x.shape == (60, 64)
        assert data.train.y.tolist() == data.test.y.tolist() == [0, 1] * 30
        assert data.train.groups is None

    def test_a_test_file_with_labels_is_preferred(self, tmp_path: Path) -> None:
        folder = write_sst2(tmp_path)
        (folder / "test.tsv").write_text('sentence\tlabel\nthe "king\t1\nis\t0\n')
        assert load("sst2", tmp_path).test.y.tolist() == [1, 0]
        (folder / "test.tsv").unlink()
        assert len(load("sst2", tmp_path).test) == 60

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, r"train.tsv: not a readable text in UTF-8 \(No such file or directory\); fetch it again"),
            (b"", r"train.tsv: got '', expected 'sentence', a tab, 'label', and sentences below"),
            (b"a fine film\t1\n", "got 'a fine film.*, expected 'sentence', a tab, 'label'"),
            (b"sentence\tlabel\n", r"got 'sentence\\tlabel', expected .*, and sentences below"),
            (b"sentence\tlabel\ngood\t1\nbad", "line 3 is 'bad', expected a sentence, a tab and 0 or 1"),
            (b"sentence\tlabel\ngood\t2\n", "line 2 is .*, expected a sentence, a tab and 0 or 1"),
            (b"sentence\tlabel\n\xff\t1\n", "not a readable text in UTF-8"),
        ],
    )
    def test_refused(self, tmp_path: Path, content: bytes | None, words: str) -> None:
        with pytest.raises(DataError, match=r"sst2: no sst2/\*.tsv in .*; set data.root to the folder that holds it"):
            load("sst2", tmp_path)
        path = write_sst2(tmp_path) / "train.tsv"
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(DataError, match=words) as problem:
            load("sst2", tmp_path)
        assert "\n" not in str(problem.value)


class TestImdb:
    def test_halves(self, tmp_path: Path) -> None:
        """Of each class half, the same ones every time, and a repeated review on one side only."""
        path = write_imdb(tmp_path, 40)
        data = load("imdb", tmp_path)
        assert data.train.x.shape == data.test.x.shape == (20, 256)
        assert int(data.train.y.sum()) == int(data.test.y.sum()) == 10
        assert torch.equal(load("imdb", tmp_path).train.x, data.train.x)
        path.write_text(json.dumps(json.loads(path.read_text()) * 2))
        assert torch.equal(load("imdb", tmp_path).train.x, data.train.x)

    def test_a_repeated_review_counts_where_it_was_first(self) -> None:
        """With its first label, and in its first place."""
        reviews = [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
        source = find_source("imdb")
        expected = halves_of_reviews(source, reviews)
        for repeated in ([*reviews, ("a", 1), ("b", 1)], [*reviews[:2], ("a", 0), *reviews[2:]]):
            for part, other in zip(halves_of_reviews(source, repeated), expected, strict=True):
                assert torch.equal(part.x, other.x)
                assert torch.equal(part.y, other.y)

    def test_line_breaks_are_no_words(self, tmp_path: Path) -> None:
        path = write_imdb(tmp_path, 4)
        path.write_text(json.dumps([{"t": f"a<br /><br />b {i}", "s": i % 2} for i in range(4)]))
        assert (load("imdb", tmp_path).train.x != 0).sum(1).tolist() == [3, 3]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda path: path.unlink(), "imdb: no imdb/reviews.json in .*; set data.root to the folder that holds it"),
            (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a readable JSON list of .*; fetch it again"),
            (lambda path: path.write_bytes(b'["\xff"]'), "not a readable text in UTF-8"),
            (lambda path: path.write_text("{}"), "0 reviews, expected two or more of a class"),
            (lambda path: path.write_text("[]"), "0 reviews, expected two or more of a class"),
            (lambda path: path.write_text('[{"t": "a", "s": 0}, {"t": "b", "s": 2}]'), r"list of .* \(entry 1 is"),
            (lambda path: path.write_text('[{"text": "a", "s": 0}]'), r"list of .* \(entry 0 is"),
            (lambda path: path.write_text("[[]]"), r"list of .* \(entry 0 is '\[\]'"),
        ],
    )
    def test_refused(self, tmp_path: Path, change: Callable[[Path], object], words: str) -> None:
        change(write_imdb(tmp_path))
        with pytest.raises(DataError, match=words) as problem:
            load("imdb", tmp_path)
        assert "\n" not in str(problem.value)
