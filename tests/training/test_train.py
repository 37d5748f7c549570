"""A run from its first step to its last, as a user meets it."""

import json

import pytest

from latte.config import from_json, load
from latte.data.tokenizer import ByteTokenizer
from latte.run import resolve
from tests.training.tiny import evaluations, losses, same_run


def test_a_run_directory_is_complete(tiny, whole):
    config = from_json((whole / "config.json").read_text())
    assert config == resolve(load(str(tiny.config)), ByteTokenizer())
    assert config.model.vocab_size == 257
    records = losses(whole)
    assert [step for step, _ in records] == list(range(1, 61))
    assert float(records[-1][1]) < 0.7 * float(records[0][1])
    assert [r["step"] for r in evaluations(whole)] == [20, 40, 60]
    for record in evaluations(whole):
        assert 1 < record["heldout_perplexity"] < 300
        assert 0 < record["heldout_bits_per_byte"] < 9
        assert all(0 < share <= 1 for share in record["latent_entropy"])
        assert all(0 < share < 1 for share in record["window_mass"])
        assert len(record["latent_entropy"]) == len(record["window_mass"]) == 2
    assert sorted(int(p.name) for p in (whole / "checkpoints").iterdir()) == [50, 55, 60]
    samples = (whole / "samples.txt").read_text()
    assert [samples.count(f"--- step {step}\n") for step in (20, 40, 60)] == [1, 1, 1]
    assert list((whole / "tensorboard").glob("events.out.tfevents*"))
    plots = {p.name for p in (whole / "plots").iterdir()}
    assert plots == {"loss.png", "latent_entropy.png", "latents.png"}
    assert all(p.stat().st_size > 5000 for p in (whole / "plots").iterdir())
    start = json.loads((whole / "environment.json").read_text())[0]
    assert {"packages", "git", "devices", "command", "python"} <= start.keys()


def test_a_clean_run_has_nothing_to_complain_of(whole):
    assert whole.with_suffix(".err").read_text() == ""


def test_the_same_command_again_is_the_same_run(tiny, whole, tmp_path):
    tiny.train(tmp_path / "again").ok()
    same_run(whole, tmp_path / "again")


def test_a_finished_run_says_so_and_changes_nothing(tiny, whole):
    before = (whole / "metrics.jsonl").read_bytes(), (whole / "samples.txt").read_bytes()
    done = tiny.train(whole).ok()
    assert done.out == f"all 60 steps of {whole} are done\n"
    assert before == ((whole / "metrics.jsonl").read_bytes(), (whole / "samples.txt").read_bytes())


@pytest.mark.slow
def test_two_devices_give_the_losses_of_one(tiny, whole, tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    tiny.train(tmp_path / "two", "--train.sample_tokens", "0", XLA_FLAGS=flags).ok()
    assert json.loads((tmp_path / "two/environment.json").read_text())[0]["devices"] == 2
    one, two = losses(whole), losses(tmp_path / "two")
    assert len(one) == len(two)
    for (step, a), (_, b) in zip(one, two, strict=True):
        assert abs(float(a) - float(b)) < 1e-5 * float(a), step
