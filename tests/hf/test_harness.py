"""`latte eval`: the harness's scores on JAX and on the exported folder, and loss by position."""

import json
from pathlib import Path

import numpy as np
import pytest

from latte.cli import main
from latte.positions import losses
from tests.hf.folders import BYTES, losses_of, make_run, random_tokens, shape
from tests.models import make

WORDS = ("the cat sat on the mat", "a dog was off", "né à Lyon", "one two three four five six")


def write_tasks(folder: Path) -> None:
    """Choices, a last word, texts to write and texts to read, each as a file of the harness."""
    rows = [
        {"query": text[:-3], "choices": [text[-3:], "x", " no"], "gold": 0, "word": text[-3:]}
        for text in WORDS
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(data)}},
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
    }
    tasks = {
        "local_choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "local_words": {
            "output_type": "loglikelihood",
            "doc_to_target": "{{word}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        "local_texts": {
            "output_type": "generate_until",
            "doc_to_target": "{{word}}",
            "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latte_r_swa", "transformer++"])
@pytest.mark.filterwarnings("default")
def test_scores_on_jax_are_those_of_the_exported_folder(
    folder, tmp_path, monkeypatch, capsys, name
):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    run = make_run(tmp_path / "run", name)
    write_tasks(tmp_path)
    command = ["eval", "--run", str(run), "--tasks", "local_choices,local_words,local_texts"]
    options = ["--task-path", str(tmp_path), "--beside", str(folder(name).path), "--json"]
    assert main([*command, *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["items_that_differ"] == 0
    assert found["tasks"].keys() == {"local_choices", "local_words", "local_texts"}
    for task, scores in found["tasks"].items():
        assert scores == pytest.approx(found["exported"][task], rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_harness_is_told_what_the_definition_says(folder):
    pytest.importorskip("lm_eval")
    import jax
    from lm_eval.api.instance import Instance

    from latte.config import MeshConfig
    from latte.harness import LatteLM
    from latte.mesh import make_mesh

    made = folder("latte_conv_swa")

    def asked(kind: str, *arguments) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    with jax.set_mesh(make_mesh(MeshConfig())):
        lm = LatteLM(made.own, BYTES, length=20, batch_size=8)
        pairs = [("the cat", " sat"), ("", "né"), ("x" * 50, "y")]
        scores = lm.loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
        rolling = lm.loglikelihood_rolling([asked("loglikelihood_rolling", "a" * 50)])
    ids = [256, *b"the cat sat"]
    expected = -losses_of(made.own, np.array(ids))[-4:].sum()
    np.testing.assert_allclose(scores[0][0], expected, rtol=1e-4)
    np.testing.assert_allclose(
        scores[1][0], -losses_of(made.own, [256, *"né".encode()]).sum(), 1e-4
    )
    np.testing.assert_allclose(scores[2][0], -losses_of(made.own, [*b"x" * 20, *b"y"])[-1], 1e-4)
    windows = [losses_of(made.own, [256, *b"a" * 20]).sum()]
    windows += [
        losses_of(made.own, [*b"a" * 21]).sum(),
        losses_of(made.own, [*b"a" * 21])[-10:].sum(),
    ]
    np.testing.assert_allclose(rolling[0], -sum(windows), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_task_that_is_not_there(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    run = make_run(tmp_path / "run", "latte")
    assert main(["eval", "--run", str(run), "--tasks", "no_such_task"]) == 2
    assert "has no task 'no_such_task'" in capsys.readouterr().err


# --- by position -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["latte", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_losses_read_in_pieces_are_those_of_the_whole(monkeypatch, name):
    model, rows = make(shape(name)), random_tokens(2, 71)
    monkeypatch.setattr("latte.positions._PIECE", 16)
    found = losses(model, rows.astype(np.int32))

    for row, nats in zip(rows, found, strict=True):
        np.testing.assert_allclose(nats, losses_of(model, row), atol=1e-4)


@pytest.mark.slow
def test_positions_add_up_to_the_held_out_loss(trained, capsys):
    """A document's end is a target of the held-out loss, and of no position."""
    assert main(["eval", "--run", str(trained), "--by-position", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["from"] for row in found["positions"]][:3] == [1, 16, 32]
    assert main(["eval", "--run", str(trained), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    count = sum(row["tokens"] for row in found["positions"])
    assert 0 <= whole["heldout_tokens"] - count <= 4
    assert main(["eval", "--run", str(trained), "--by-position", "100"]) == 0
    assert "perplexity" in capsys.readouterr().out
