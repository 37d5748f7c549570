"""The command `latte` as a user meets it: real processes, exit status, one sentence on stderr."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from latte.config import load, settings, to_json

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = ["train", "eval", "generate", "serve", "export", "import", "plan", "data"]
COMMANDS += [f"data {name}" for name in ("prepare", "tokenizer", "verify", "stats", "show")]

NO_JAX = (
    "import sys, latte.cli\n"
    "status = latte.cli.main(sys.argv[1:])\n"
    "assert 'jax' not in sys.modules, 'jax was imported'\n"
    "sys.exit(status)"
)


def latte(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Runs `latte` in a process of its own, which fails if it imports JAX."""
    return subprocess.run(
        [sys.executable, "-c", NO_JAX, *arguments], cwd=cwd, capture_output=True, text=True
    )


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory of latte_tiny that has not begun."""
    (tmp_path / "config.json").write_text(to_json(load("latte_tiny")))
    return tmp_path


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command):
    done = latte(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: latte {command}".rstrip())


def test_help_is_quick():
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "latte", "--help"], check=True, capture_output=True)
    assert time.perf_counter() - start < 0.5


def test_train_help_shows_every_setting_with_its_value_and_meaning():
    text = " ".join(latte("train", "--config", "latte_tiny", "--help").stdout.split())
    for setting in settings(load("latte_tiny")):
        assert f"--{setting.key} " in text
        assert setting.doc in text
    width = load("latte_tiny").model.width
    assert f"--model.width {width} Width of the residual stream." in text
    assert "--model.width 768 " in " ".join(latte("train", "--help").stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "no command; there are train, eval, generate, serve, export, import, plan, data"),
        ("trian", "unknown command 'trian'; did you mean train?"),
        ("data prepar", "did you mean prepare?"),
        ("train", "--config is missing"),
        ("train --config", "argument --config: expected one argument"),
        ("train --confg latte_tiny", "unknown option '--confg'; did you mean --config?"),
        ("train --config latte_tinny", "did you mean latte_tiny?"),
        ("train --config nowhere.py", "there is no config file nowhere.py"),
        ("train --config latte_tiny --train.step 3", "did you mean train.steps?"),
        ("train --config latte_tiny --train.steps ten", "it must be a whole number"),
        ("train --config latte_tiny --model.width 100 --model.heads 7", "model.heads (7) does not"),
        ("train --config latte_tiny --run-dir pyproject.toml", "pyproject.toml is a file"),
        ("data prepare --config latte_tiny --data.heldout 2", "data.heldout is 2.0"),
        ("plan --config latte_tiny", "--topology is missing"),
        ("plan --config latte_tiny --topology v9:2x2", "there is no TPU 'v9'"),
        (
            "plan --config latte_tiny --topology v5e:2x2 --mesh.fsdp 3",
            "does not fill the 4 devices",
        ),
        ("eval", "--run is missing"),
        ("eval --run nowhere", "nowhere is no run directory"),
        ("eval --run nowhere --jsn", "did you mean --json?"),
        ("generate --run-dir nowhere --tokens ten", "--tokens: invalid int value: 'ten'"),
        ("generate --run nowhere", "nowhere is no run directory"),
        ("serve --run nowhere", "nowhere is no run directory"),
        ("export --run nowhere --out out", "nowhere is no run directory"),
        ("import --run nowhere", "--from is missing"),
        ("import --from nowhere --run out", "nowhere is no model's folder"),
    ],
)
def test_bad_input_is_one_sentence_at_once(arguments, words):
    done = latte(*arguments.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("latte: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tokens 0", "--tokens is 0, but it must be at least 1"),
        ("--temperature -1", "--temperature is -1.0"),
        ("--temperature nan", "--temperature is nan"),
        ("--top-k -2", "--top-k is -2"),
        ("--top-p 0", "--top-p is 0.0, but it must be above 0 and at most 1"),
    ],
)
def test_bad_sampling(run, arguments, words):
    done = latte("generate", "--run", str(run), *arguments.split())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_prompt_that_is_no_text(run):
    done = latte("generate", "--run", str(run), "--prompt", os.fsdecode(b"\xff"))
    assert done.returncode == 2
    assert done.stderr == "latte: --prompt is not UTF-8; give it as text of that encoding\n"


def test_a_run_directory_of_another_config(run):
    before = (run / "config.json").read_text()
    lr = load("latte_tiny").optim.lr
    done = latte("train", "--config", "latte_tiny", "--optim.lr", "1", "--run-dir", str(run))
    assert done.returncode == 2
    assert done.stderr == (
        f"latte: {run} holds a run with optim.lr {lr}, and this one has 1.0; "
        f"set --optim.lr {lr} to go on with it, or choose another --run-dir\n"
    )
    assert (run / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("config = Config()", "line 2: TypeError"),
        (
            "config = Config(name='a', model=ModelConfig(width='1'))",
            "model.width is '1', but it must be a whole number",
        ),
    ],
)
def test_a_config_file_with_a_mistake(tmp_path, body, words):
    path = tmp_path / "mine.py"
    path.write_text(f"from latte.config import Config, ModelConfig\n{body}\n")
    done = latte("train", "--config", str(path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert words in done.stderr


def test_data_prepare_prints_what_it_made(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one line of text\n" * 200)
    data = ["--data.path", str(text), "--data.tokenizer", "bytes", "--data.heldout", "0.1"]
    command = ["data", "prepare", "--config", "latte_tiny", "--json", *data]
    done = latte(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (tmp_path / made["store"] / "manifest.json").is_file()
    assert made["train_bytes"] + made["heldout_bytes"] == len(text.read_bytes())
    plain = latte(*(word for word in command if word != "--json"), cwd=tmp_path)
    assert plain.stdout.split()[:2] == ["store", made["store"]]


def test_a_corpus_that_is_not_there(tmp_path):
    command = ["data", "prepare", "--config", "latte_tiny", "--data.path", str(tmp_path / "none")]
    done = latte(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("latte: ")
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "none") in done.stderr
