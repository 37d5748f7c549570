"""`latte eval` and `latte generate` on a finished run."""

import json
import subprocess
import sys

import pytest

from latte.cli import main
from latte.generate import generate_run
from tests.training.tiny import ENVIRONMENT, evaluations


def test_eval_gives_the_last_evaluation_of_the_run(whole, capfd):
    # To the bit on as many devices as the run had.
    command = [sys.executable, "-m", "latte", "eval", "--run", str(whole), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    last = evaluations(whole)[-1]
    assert values.pop("step") == last["step"] == 60
    assert values == {name: last[name] for name in values}
    assert values.keys() >= {"heldout_loss", "heldout_perplexity", "heldout_bits_per_byte"}
    assert main(["eval", "--run", str(whole)]) == 0
    assert f"{last['heldout_bits_per_byte']:.5g}" in capfd.readouterr().out


def text(whole, capfd, *options: str) -> str:
    capfd.readouterr()
    assert main(["generate", "--run", str(whole), "--tokens", "20", *options]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("prompt", ["the cat ", "", "né 😀\n"])
def test_a_seed_decides_the_text(whole, capfd, prompt):
    one, same, other = (text(whole, capfd, "--prompt", prompt, "--seed", s) for s in "112")
    assert one == same
    assert one != other
    assert one.startswith(prompt)
    assert one.endswith("\n")


def test_json_is_the_same_text(whole, capfd):
    plain = text(whole, capfd, "--prompt", "the ")
    [record] = json.loads(text(whole, capfd, "--prompt", "the ", "--json"))
    assert record["prompt"] == "the "
    assert plain == record["prompt"] + record["text"] + "\n"


def test_a_batch_is_so_many_texts(whole, capfd):
    records = json.loads(text(whole, capfd, "--prompt", "the ", "--batch", "3", "--json"))
    assert len(records) == 3
    assert len({record["text"] for record in records}) > 1
    plain = text(whole, capfd, "--prompt", "the ", "--batch", "3")
    assert plain == "\n---\n".join("the " + record["text"] for record in records) + "\n"


def test_the_likeliest_text_needs_no_seed(whole, capfd):
    options = ("--prompt", "the ", "--temperature", "0")
    one, other = (text(whole, capfd, *options, "--seed", seed) for seed in "12")
    assert one == other
    assert text(whole, capfd, "--prompt", "the ", "--top-k", "1") == one
    assert text(whole, capfd, "--prompt", "the ", "--top-p", "1e-6") == one
    records = json.loads(text(whole, capfd, *options, "--batch", "2", "--json"))
    assert [record["text"] for record in records] == [one[4:-1]] * 2


@pytest.mark.slow
def test_text_comes_in_pieces_while_it_is_written(whole):
    pieces = list(generate_run(whole, ["the "], tokens=70, temperature=0.0))
    assert len([piece for piece in pieces if piece]) > 2
    command = [sys.executable, "-m", "latte", "generate", "--run", str(whole), "--prompt", "the "]
    command += ["--tokens", "70", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the " + "".join(pieces) + "\n"
