"""`latte export` and `latte import` as a user meets them, and what they refuse."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import torch
import transformers

from latte.cli import main
from latte.config import MeshConfig
from latte.data.tokenizer import train_sentencepiece
from latte.errors import UserError
from latte.hf.export import push
from latte.hf.folder import INDEX, read_model
from latte.hf.parity import compare
from latte.hf.tokenizers import write_tokenizer
from latte.mesh import make_mesh
from latte.run import open_run
from tests import definitions
from tests.hf.folders import (
    BYTES,
    SHAPES,
    TRANSFORMER_PP,
    make_run,
    random_tokens,
    read,
    same,
    shape,
)
from tests.models import make
from tests.training.tiny import evaluations


def same_bits(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run of random weights."""
    return make_run(tmp_path_factory.mktemp("commands") / "run", "latte_r_swa")


@pytest.fixture(scope="session")
def said(run) -> dict:
    """What `latte export` printed of that run, whose folder is beside it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["export", "--run", str(run), "--out", str(run.parent / "out"), "--json"]) == 0
    return json.loads(printed.getvalue())


@pytest.fixture(scope="session")
def out(said) -> Path:
    return Path(said["out"])


def test_export_says_what_it_compared(said):
    assert said["largest_difference"] < 1e-5
    assert (said["step"], said["class"]) == (7, "LatteForCausalLM")
    assert said["greedy_tokens"] == 64
    assert said["greedy_tokens_same"] == 64 * said["prompts"]


def same_text(run: Path, out: Path, capsys) -> None:
    """Asserts that `latte generate` and the folder write on alike."""
    options = ["--prompt", "the cat ", "--tokens", "100", "--temperature", "0"]
    assert main(["generate", "--run", str(run), *options]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    prompt = tokenizer("the cat ", return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=100, do_sample=False)[0]
    assert tokenizer.decode(text, skip_special_tokens=True) == expected


@pytest.mark.slow
def test_the_exported_text_is_that_of_generate(run, out, capsys):
    same_text(run, out, capsys)


@pytest.mark.slow
def test_a_trained_run_and_its_card(trained, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", "--run", str(trained), "--out", str(out), "--licence", "mit"]) == 0
    capsys.readouterr()
    same_text(trained, out, capsys)
    card = (out / "README.md").read_text()
    figure = [r["heldout_bits_per_byte"] for r in evaluations(trained)][-1]
    assert card.startswith("---\nlicense: mit\n")
    for words in ("`latte train --config tiny`", "for 60 steps", f"{figure:.4f}", " documents, "):
        assert words in card
    assert str(trained.parent) not in "".join(p.read_text() for p in out.glob("*.[mj]*"))


def test_import_gives_the_run_back_to_the_bit(run, out, tmp_path, capsys):
    back = tmp_path / "back"
    assert main(["import", "--from", str(out), "--run", str(back), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 7
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        (config, tokenizer, model, step), own = open_run(back), open_run(run)
    same_bits(model, own[2])
    assert (config.model, step) == (own[0].model, 7)
    assert tokenizer.fingerprint == own[1].fingerprint


@pytest.mark.parametrize("name", SHAPES)
def test_every_model_comes_back_to_the_bit(folder, name):
    same_bits(read_model(shape(name), folder(name).path), make(shape(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_model_is_exported(name, tmp_path):
    run = make_run(tmp_path / "run", name)
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "modeling_latte.py").exists() == (name != TRANSFORMER_PP)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_transformers_is_read(tmp_path, capsys, tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder, run = tmp_path / "llama", tmp_path / "run"
    llama.save_pretrained(folder)
    BYTES.save(folder)
    assert main(["import", "--from", str(folder), "--run", str(run)]) == 0
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        _, _, model, _ = open_run(run)
    tokens = random_tokens(60)
    same(definitions.logits(definitions.wide(model), tokens), read(llama, tokens[None])[0])


def test_a_llama_with_more_than_ours_is_refused(tmp_path, capsys):
    folder = tmp_path / "llama"
    config = transformers.LlamaConfig(num_hidden_layers=1, attention_bias=True)
    config.save_pretrained(folder)
    said = refused(["import", "--from", str(folder), "--run", str(tmp_path / "run")], capsys)
    assert "has attention_bias True, but only False can be read" in said


def refused(arguments: list[str], capsys) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("latte: ")
    assert said.count("\n") == 1
    return said


def test_a_run_without_a_checkpoint_is_refused(run, tmp_path, capsys):
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("checkpoints"))
    said = refused(["export", "--run", str(bare), "--out", str(tmp_path / "out")], capsys)
    assert "has no checkpoint yet" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_not_written_over(run, out, capsys):
    said = refused(["export", "--run", str(run), "--out", str(out)], capsys)
    assert "is there already" in said
    said = refused(["import", "--from", str(out), "--run", str(run)], capsys)
    assert "is there already" in said


def damage_shard(folder: Path) -> None:
    shard = folder / next(iter(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def remove_shard(folder: Path) -> None:
    next(folder.glob("model-*.safetensors")).unlink()


def another_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["latte"]["vocab_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))


def another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["latte"]["ff"] = 48
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_shard, "is not whole"),
        (remove_shard, "is missing; copy the folder again"),
        (another_vocabulary, "the tokenizer of"),
        (another_width, "but the config asks for"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{}"), "no model"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / INDEX).unlink(), "is it a model's folder?"),
    ],
)
def test_a_damaged_folder_is_one_sentence(out, tmp_path, capsys, damage, words):
    folder = tmp_path / "folder"
    shutil.copytree(out, folder)
    damage(folder)
    run = tmp_path / "run"
    assert words in refused(["import", "--from", str(folder), "--run", str(run)], capsys)
    assert not run.exists()


def test_a_difference_is_refused(folder):
    made = folder("latte_r_swa")
    other = eqx.tree_at(lambda m: m.backbone.norm.scale, made.own, replace_fn=lambda x: 1.001 * x)
    with pytest.raises(UserError, match="more than the 1e-04 of rounding: nothing was exported"):
        compare(other, BYTES, made.path)


def test_a_hub_that_cannot_be_reached_is_one_sentence(folder):
    """The tests' environment keeps the hub's client off the network."""
    with pytest.raises(UserError, match="was written, but could not be put on the hub as me/mine"):
        push(folder("latte").path, "me/mine")


def test_tokenizers_read_alike(tmp_path):
    """Bytes and sentencepiece; texts with all that a vocabulary could trip over."""
    texts = [Path(__file__).read_text(), Path(json.__file__).read_text()]
    pieces = train_sentencepiece(texts, sum(map(len, texts)), 600)
    rng = np.random.default_rng(0)
    ranges = ((32, 127), (0xA0, 0x3000), (0x1F000, 0x1F900), (0, 33))
    for number, own in enumerate((BYTES, pieces)):
        write_tokenizer(own, tmp_path / str(number))
        other = transformers.AutoTokenizer.from_pretrained(tmp_path / str(number))
        for _ in range(50):
            low, high = ranges[rng.integers(4)]
            text = texts[0][: rng.integers(200)] + "".join(map(chr, rng.integers(low, high, 30)))
            ids = [own.separator, *own.encode(text).tolist()]
            assert other(text)["input_ids"] == ids
            assert other.decode(ids, skip_special_tokens=True) == text


def test_rows_beyond_the_vocabulary_are_never_written(folder):
    config = transformers.GenerationConfig.from_pretrained(folder("latte").path)
    assert config.suppress_tokens == [257, 258, 259]
