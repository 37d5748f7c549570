"""A run on a store of several sets: a mixture, packed whole, and an evaluation of each set."""

import json
import math

import pytest

from latte.cli import main
from latte.config import DataConfig
from latte.data.engine import Engine
from latte.data.prepare import prepare_at
from tests.data.recordfiles import books, write
from tests.training.tiny import Tiny, evaluations, losses


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for i in range(2):
        write(folder / f"corpus/{i}.jsonl.zst", books(200, first=i * 200, names=("A", "A", "B")))
    config = DataConfig(path=str(folder / "corpus"), tokenizer="bytes", heldout=0.1)
    return prepare_at(config, str(folder / "out"), Engine(workers=1))


def test_each_set_is_evaluated_beside_the_whole(tiny: Tiny, store, tmp_path, capfd):
    settings = ["--data.store", str(store.place), "--data.packing", "fit", "--train.steps", "20"]
    settings += ["--data.mixture", "A=0.2, B=0.8, @10, A=1", "--train.eval_tokens", "100000"]
    settings += ["--model.layers", "1", "--model.pattern", "latte", "--train.sample_tokens", "0"]
    run_dir = tmp_path / "run"
    assert main(tiny.arguments(run_dir, *settings)) == 0
    assert len(losses(run_dir)) == 20
    [seen] = evaluations(run_dir)
    parts = {name: seen[f"heldout_loss/{name}"] * seen[f"heldout_tokens/{name}"] for name in "AB"}
    counts = store.manifest.subsets["heldout"]
    for name in "AB":
        assert seen[f"heldout_tokens/{name}"] == counts[name].tokens
        bits = parts[name] / math.log(2) / counts[name].bytes
        assert seen[f"heldout_bits_per_byte/{name}"] == pytest.approx(bits)
        perplexity = math.exp(seen[f"heldout_loss/{name}"])
        assert seen[f"heldout_perplexity/{name}"] == pytest.approx(perplexity)
    assert seen["heldout_tokens"] == sum(count.tokens for count in counts.values())
    assert seen["heldout_loss"] == pytest.approx(sum(parts.values()) / seen["heldout_tokens"])
    capfd.readouterr()
    assert main(["eval", "--run", str(run_dir), "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert again["heldout_loss/B"] == pytest.approx(seen["heldout_loss/B"], rel=1e-5)


def test_a_mixture_of_what_the_store_has_not(tiny: Tiny, store, tmp_path, capfd):
    settings = ["--data.store", str(store.place), "--data.mixture", "A=1, C=1"]
    assert main(tiny.arguments(tmp_path / "run", *settings)) == 2
    assert "data.mixture names 'C'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_store_that_is_not_whole(tiny: Tiny, store, tmp_path, capfd):
    settings = ["--data.store", str(tmp_path / "none")]
    assert main(tiny.arguments(tmp_path / "run", *settings)) == 2
    assert "none/manifest.json is missing" in capfd.readouterr().err
