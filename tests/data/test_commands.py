"""`latte data …`: what a user sees of a store."""

import argparse
import json
from pathlib import Path

import pytest

from latte.cli import main
from latte.config import DataConfig, load
from latte.data.engine import Engine
from latte.data.loader import Loader
from latte.data.prepare import prepare_at
from latte.data.store import TokenStore
from tests.data.recordfiles import books, write


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    folder = tmp_path_factory.mktemp("shown")
    for i in range(3):
        write(folder / f"corpus/{i}.jsonl.zst", books(300, first=i * 300))
    config = DataConfig(path=str(folder / "corpus"), tokenizer="bytes")
    return prepare_at(config, str(folder / "out"), Engine(workers=1))


def run(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["data", *arguments]) == 0
    return capsys.readouterr().out


def test_prepare_and_tokenizer_go_by_a_corpus(tmp_path, capsys):
    source = Path(argparse.__file__).read_text().split("\n\n")
    write(tmp_path / "corpus/a.jsonl.gz", [(f"{i} {part}", "A") for i, part in enumerate(source)])
    corpus = ["--corpus", str(tmp_path / "corpus")]
    model = str(tmp_path / "deep/mine.model")
    for kind in ("bpe", "unigram"):
        arguments = ["--vocab", "400", "--kind", kind, "--out", model, "--json"]
        made = json.loads(run(capsys, "tokenizer", *corpus, *arguments))
        assert made["vocab_size"] == 400
    out = str(tmp_path / "out")
    said = json.loads(run(capsys, "prepare", *corpus, "--tokenizer", model, "--out", out, "--json"))
    assert said["train_documents"] + said["heldout_documents"] == len(source)
    assert TokenStore.open(out).tokenizer.fingerprint == made["fingerprint"]
    assert json.loads(run(capsys, "prepare", *corpus, "--tokenizer", model, "--out", out, "--json"))


def test_verify_says_what_was_checked(store, capsys):
    for full, words in (([], "sizes"), (["--full"], "checksums")):
        said = json.loads(run(capsys, "verify", str(store.place), "--json", *full))
        assert (said["shards"], said["checked"]) == (3, words)
    assert main(["data", "verify", str(store.place) + "x"]) == 2
    assert "manifest.json is missing" in capsys.readouterr().err
    assert main(["data", "verify"]) == 2


def test_stats_are_those_of_the_documents(store, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    said = json.loads(run(capsys, "stats", str(store.place), "--plot", str(plot), "--json"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [row for i in range(3) for row in books(300, first=i * 300)]
    for name in "ABC":
        mine = [some for some in said if some["subset"] == name]
        assert sum(some["documents"] for some in mine) == sum(of == name for _, of in rows)
        assert all(some["bytes_per_token"] == 1 for some in mine)  # of bytes, separators aside
        [train] = [some for some in mine if some["split"] == "train"]
        assert train["lengths"][-1] <= max(len(text.encode()) for text, _ in rows) + 1
    table = run(capsys, "stats", str(store.place)).splitlines()
    assert table[0].split()[:4] == ["split", "subset", "tokens", "documents"]
    assert len(table) == 7


@pytest.mark.parametrize("packing", ["cut", "fit"])
def test_show_prints_the_row_and_the_line_that_it_came_from(store, tmp_path, capsys, packing):
    config = ["--config", "latte_tiny", "--data.store", str(store.place)]
    config += ["--train.sequence_length", "100", "--data.packing", packing]
    batch_size, seed = load("latte_tiny").train.batch_size, load("latte_tiny").train.seed
    data = DataConfig(packing=packing)
    loader = Loader(store, "train", seed, batch_size, 100, data=data)
    lines = {}
    for step, row in ((1, 0), (7, batch_size - 1)):
        where = ["--step", str(step), "--row", str(row)]
        shown = json.loads(run(capsys, "show", *config, *where, "--json"))
        batch = loader.batch_at(step - 1)
        real = batch.tokens[row][batch.weights[row] > 0]
        assert "".join(piece["text"] for piece in shown) == store.tokenizer.decode(real)
        assert sum(piece["tokens"] for piece in shown) == len(real)
        for piece in shown:
            file = piece["file"]
            lines[file] = lines.get(file) or books(300, first=int(file[0]) * 300)
            text, subset = lines[file][piece["line"] - 1]
            assert subset == piece["subset"]
            content = b"\0" + text.encode()  # the separator is the first token, of no bytes
            part = content[piece["start"] : piece["start"] + piece["tokens"]]
            assert part.strip(b"\0").decode(errors="replace") == piece["text"]
        plain = run(capsys, "show", *config, *where)
        assert f"--- {shown[0]['file']}:{shown[0]['line']}  {shown[0]['subset']}" in plain


def test_show_names_the_file_of_a_text(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    for name in "ab":
        (text / f"{name}.txt").write_text(f"{name}" * 300)
    config = ["--config", "latte_tiny", "--data.path", str(text), "--data.tokenizer", "bytes"]
    config += ["--train.sequence_length", "64", "--data.cache", str(tmp_path / "cache")]
    [piece, *_] = json.loads(run(capsys, "show", *config, "--json"))
    assert Path(piece["file"]).suffix == ".txt"
    assert piece["line"] == 0
    assert set(piece["text"]) == {piece["file"][0]}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("show --config latte_tiny --step 0", "--step is 0, but it must be at least 1"),
        ("show --config latte_tiny --row 99999", "a batch has rows 0 to"),
        ("prepare --corpus stdlib --workers 2", "need --out"),
        ("prepare --corpus /none/such --tokenizer bytes", "/none/such is neither a file nor"),
        ("tokenizer --corpus stdlib", "--out is missing"),
        ("tokenizer --corpus stdlib --out x.model --vocab 300000", "must be at most 262144"),
        ("verify ftp://a/b", "is no place that is known"),
        ("stats /none/such --full", "unknown argument '--full'"),
    ],
)
def test_a_mistake_is_one_sentence(command, words, capsys):
    assert main(["data", *command.split()]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
