"""Words of a file, tokenizers of Hugging Face, and texts of which the next token is learned."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import incofl
from incofl.config import make_config
from incofl.data import find_source
from incofl.data.texts import list_words
from incofl.data.tokenizers import find_tokenizer
from incofl.engine.build import build, build_data, outline
from incofl.errors import DataError
from tests.shell import Shell
from tests.texts import write_imdb, write_sst2

WORDS = ["the", "a", "film", ".", "good"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Phrases with labels, and reviews."""
    (tmp_path / "sst2").mkdir()
    for name in ("train", "test"):
        (tmp_path / "sst2" / f"{name}.tsv").write_text("sentence\tlabel\nA good film .\t1\nThe king , the film\t0\n")
    (tmp_path / "imdb").mkdir()
    texts = ["The film . " * 3, "A good film", "the king the film a good film .", "The the the the"]
    entries = [{"t": text, "s": number % 2} for number, text in enumerate(texts)]
    (tmp_path / "imdb" / "reviews.json").write_text(json.dumps(entries))
    (tmp_path / "words.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return tmp_path


def keys(root: Path, *more: str) -> list[str]:
    return [f"data.root={str(root)!r}", f"data.tokenizer={str(root / 'words.txt')!r}", "data.length=6", *more]


def test_tokens_are_places_in_the_file(root: Path) -> None:
    """0 is padding, 1 a word that is not there, and the first word of the file is 2."""
    config = make_config(None, keys(root, "data.name=sst2", "data.clients=1", "cohort=1"))
    data = build_data(config)
    assert data.train.x.tolist() == [[3, 6, 4, 5, 0, 0], [2, 1, 1, 2, 4, 0]]
    assert data.train.y.tolist() == [1, 0]
    model = outline(config).model
    assert model.initial["embedding.weight"].shape[0] == len(WORDS) + 2
    assert model.initial["position.weight"].shape[0] == 6


def test_the_next_token_in_windows(root: Path) -> None:
    """Every whole window of every text; what is left at the end of a text is dropped."""
    config = make_config(None, [*keys(root, "data.name=imdb", "data.target=next", "data.clients=1"), "data.length=3"])
    source, data = find_source("imdb"), build_data(config)
    x, y = (torch.cat([getattr(part, name) for part in (data.train, data.test)]).tolist() for name in "xy")
    rows = {tuple(window): tuple(following) for window, following in zip(x, y, strict=True)}
    nine = [2, 4, 5] * 3  # the film . the film . the film .
    eight = [2, 1, 2, 4, 3, 6, 4, 5]
    expected = [(nine, 0), (nine, 3), (eight, 0), (eight, 3), ([2, 2, 2, 2], 0)]
    assert rows == {tuple(text[at : at + 3]): tuple(text[at + 1 : at + 4]) for text, at in expected}
    assert data.classes == len(WORDS) + 2
    assert source.classes == 2  # the table is as it was
    federation = outline(config)
    assert federation.model.initial["head.weight"].shape[0] == len(WORDS) + 2
    assert config.data.partition == "iid"


def test_most_frequent_words_of_the_training_texts(incofl: Shell, root: Path) -> None:
    code, out, _ = incofl("data", "words", "sst2", "--root", root, "--count", "3", "--out", root / "found.txt")
    assert (code, out.split("\n")[0][:13]) == (0, "wrote 3 words")
    assert (root / "found.txt").read_text() == "film\nthe\n,\n"  # twice each, then the first of those that occur once
    assert list_words(find_source("sst2"), root, 100)[:2] == ["film", "the"]
    code, _, err = incofl("data", "words", "shakespeare", "--root", root)
    assert (code, err) == (2, "incofl: shakespeare: has no words, expected one of sst2, imdb\n")


def test_from_pretraining_to_adapters(tmp_path: Path) -> None:
    """All with the product: the words of one data set, a run that learns the next word, adapters on another."""
    write_imdb(tmp_path)
    write_sst2(tmp_path)
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{word}\n" for word in list_words(find_source("imdb"), tmp_path, 10)))
    both = [f"data.root={str(tmp_path)!r}", f"data.tokenizer={str(words)!r}", "data.length=8", "engine.workers=1"]
    both += ["model.name=tiny-transformer", "rounds=1", "local.epochs=1"]
    first = ["data.name=imdb", "data.target=next", "data.clients=1", "cohort=1", "method=alllarge", "split.levels=1"]
    incofl.run(make_config(None, [*both, *first]), tmp_path / "pretrained", progress=False)
    learned = incofl.load_model(tmp_path / "pretrained").state_dict()
    second = ["data.name=sst2", "data.clients=3", "cohort=3", "method=flexlora", "split.levels=[1,2,4]"]
    second.append(f"model.pretrained={str(tmp_path / 'pretrained')!r}")
    config = make_config(None, [*both, *second])
    initial = build(config).model.initial
    assert torch.equal(initial["embedding.weight"], learned["embedding.weight"])
    assert torch.equal(initial["blocks.1.mlp.fc1.base_layer.weight"], learned["blocks.1.mlp.fc1.weight"])
    assert initial["head.weight"].shape[0] == 2  # fresh: it has other classes
    result = incofl.run(config, tmp_path / "adapted", progress=False)
    assert torch.equal(result.model().state_dict()["embedding.weight"], learned["embedding.weight"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["data.tokenizer='/no/such/file'"],
            "data.tokenizer: got '/no/such/file', which is not there, expected a text",
        ),
        (["data.name=digits"], "data.tokenizer: got .*, expected none: digits has no texts of words"),
        (["data.name=shakespeare", "data.target=next"], "expected none: shakespeare has no texts of words"),
    ],
)
def test_what_cannot_be_read_so(root: Path, more: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        outline(make_config(None, keys(root, "data.name=sst2", *more)))


def test_wrong_files(root: Path) -> None:
    (root / "twice.txt").write_text("a\nb\na\n")
    with pytest.raises(DataError, match=r"twice.txt has an empty line or a word twice, expected a word in each line"):
        make_config(None, keys(root, "data.name=sst2", f"data.tokenizer={str(root / 'twice.txt')!r}"))
    config = make_config(None, [*keys(root, "data.name=imdb", "data.target=next"), "data.length=50"])
    with pytest.raises(DataError, match=r"no text has more than 50 tokens, expected some: set a smaller data.length"):
        build_data(config)
    (root / "sst2.safetensors").write_bytes((root / "sst2" / "train.tsv").read_bytes())  # a cached copy has tokens
    assert len(build_data(make_config(None, keys(root, "data.name=sst2"))).train) == 2


def test_a_tokenizer_of_hugging_face_beside_a_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is found where the model's is; texts have their special tokens and a mask."""
    transformers = pytest.importorskip("transformers")
    folder = root / "bert"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "film", "good", ".", "##s"]
    made = transformers.BertConfig(vocab_size=len(pieces), max_position_embeddings=16, **sizes)
    transformers.BertForSequenceClassification(made).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    name = "model.name='hf:AutoModelForSequenceClassification'"
    model = [name, f"model.pretrained={str(folder)!r}", f"data.root={str(root)!r}", "data.name=sst2"]
    config = make_config(None, [*model, "data.length=8", "data.clients=1", "cohort=1", "rounds=1", "engine.workers=1"])
    assert config.data.tokenizer == str(folder)
    # Code beside the words is not run, nor is anybody asked whether to.
    (folder / "own.py").write_text(f"open({str(root / 'ran')!r}, 'w').close()\n")
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (root / "theirs").mkdir()
    for name in ("own.py", "vocab.txt"):
        shutil.copy(folder / name, root / "theirs" / name)
    (root / "theirs" / "tokenizer_config.json").write_text(json.dumps(said))
    monkeypatch.setattr("builtins.input", lambda *said: "y")
    with contextlib.suppress(DataError):  # words without their code may be read or not
        find_tokenizer(str(root / "theirs"))
    assert not (root / "ran").exists()
    data = build_data(config)
    assert data.train.x["input_ids"].tolist()[0] == [2, 6, 8, 7, 9, 3, 0, 0]  # [CLS] a good film . [SEP]
    assert data.train.x["attention_mask"].tolist()[0] == [1, 1, 1, 1, 1, 1, 0, 0]
    result = incofl.run(make_config(config, ["local.epochs=1"]), root / "run", progress=False)
    assert result["accuracy_by_level"]
