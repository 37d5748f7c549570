"""Each mistake is one clear sentence on stderr and exit status 2, before anything is compiled."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from latte.cli import main
from tests.training.disk import fill, mounted
from tests.training.tiny import ENVIRONMENT, Tiny


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails when JAX compiles a program meanwhile, or takes one from its cache."""
    seen: list[str] = []

    def note(event: str, *_, **__) -> None:
        if "compil" in event and "trace" not in event:  # a trace for shapes takes no time
            seen.append(event)

    jax.monitoring.register_event_listener(note)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_listener(note)
        jax.monitoring.unregister_event_duration_listener(note)
    assert seen == []


def refused(capfd, arguments: list[str], *words: str) -> None:
    """Asserts that a command ends with status 2 and one sentence, which has all of `words`."""
    capfd.readouterr()
    with nothing_compiled():
        assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [said] = err.splitlines()
    assert said.startswith("latte: ")
    for word in words:
        assert word in said


def test_compiling_would_be_noticed():
    with pytest.raises(AssertionError), nothing_compiled():
        jax.jit(lambda x: x * 17 + 3)(1.0)


@pytest.fixture
def begun(tiny, whole, tmp_path) -> Path:
    """A run of the tiny config that has begun."""
    return shutil.copytree(whole, tmp_path / "begun")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("--model.widht 64", "unknown setting 'model.widht'; did you mean model.width?"),
        ("--train.steps many", "train.steps is 'many', but it must be a whole number"),
        ("--model.heads 3", "model.heads (3) does not divide model.width (32)"),
        ("--train.accumulate 3", "train.accumulate (3) does not divide train.batch_size (8)"),
        ("--model.vocab_size 200", "model.vocab_size (200) is smaller than the tokenizer's (257)"),
        ("--train.sequence_length 100000", "tokens, fewer than a row of 100000"),
        ("--data.path /nowhere/at/all", "/nowhere/at/all is neither a file nor a folder"),
        ("--data.tokenizer sentencepiece --data.tokenizer_vocab 4000", "--data.tokenizer_vocab"),
        ("--data.tokenizer byte", "data.tokenizer is 'byte'"),
    ],
)
def test_settings(tiny: Tiny, tmp_path, capfd, settings, words):
    refused(capfd, tiny.arguments(tmp_path / "run", *settings.split()), words)
    assert not (tmp_path / "run").exists()


def test_an_empty_corpus(tiny, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    settings = ("--data.path", str(tmp_path / "empty"))
    refused(capfd, tiny.arguments(tmp_path / "run", *settings), "holds no files", "--data.path")
    (tmp_path / "empty" / "a.txt").touch()
    refused(capfd, tiny.arguments(tmp_path / "run", *settings), str(tmp_path / "empty"))


def test_a_file_that_cannot_be_read(tiny, tmp_path, capfd):
    text = shutil.copytree(tiny.text, tmp_path / "text")
    (text / "link.txt").symlink_to("nowhere")
    settings = ("--data.path", str(text))
    refused(capfd, tiny.arguments(tmp_path / "run", *settings), "link.txt")


def test_invalid_utf8_is_named_and_can_be_left_out(tiny, tmp_path, capfd):
    text = shutil.copytree(tiny.text, tmp_path / "text")
    (text / "latin.txt").write_bytes("caf\u00e9\n".encode("latin-1"))
    settings = ("--data.path", str(text))
    refused(
        capfd,
        tiny.arguments(tmp_path / "run", *settings),
        "latin.txt",
        "UTF-8",
        "--data.skip_bad",
    )
    short = ("--train.steps", "1", "--optim.warmup", "1", "--train.sample_tokens", "0")
    small = ("--model.pattern", "latte", "--model.layers", "1", "--model.width", "8")
    arguments = tiny.arguments(tmp_path / "run", *settings, *short, *small, "--data.skip_bad", "1")
    assert main(arguments) == 0
    assert "left out latin.txt" in capfd.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "1").exists()


def test_a_run_of_another_config(tiny, begun, capfd):
    record = (begun / "config.json").read_text()
    refused(capfd, tiny.arguments(begun, "--optim.lr", "1"), str(begun), "optim.lr 0.003", "1.0")
    assert (begun / "config.json").read_text() == record


def test_a_corpus_that_has_changed(tiny, begun, tmp_path, capfd):
    """The tokenizer is bytes for both, so that only the text tells."""
    (tiny.text / "new.txt").write_text("more text\n" * 50)
    try:
        refused(capfd, tiny.arguments(begun), "the text of", f"{begun} was trained with")
        refused(capfd, ["eval", "--run", str(begun)], "the text of", f"{begun} was trained with")
    finally:
        (tiny.text / "new.txt").unlink()


def test_a_tokenizer_that_does_not_match_the_store(tiny, tmp_path, capfd):
    """A tokenizer trained on the corpus is another one when the corpus is another one."""
    text = shutil.copytree(tiny.text, tmp_path / "text")
    settings = ["--data.path", str(text), "--data.tokenizer", "sentencepiece"]
    settings += ["--data.tokenizer_vocab", "290", "--train.steps", "1", "--optim.warmup", "1"]
    settings += ["--model.pattern", "latte", "--model.layers", "1", "--model.width", "8"]
    settings += ["--train.sample_tokens", "0", "--data.cache", str(tmp_path / "cache")]
    run_dir = tmp_path / "run"
    assert main(tiny.arguments(run_dir, *settings)) == 0
    for file in text.iterdir():
        file.write_text("entirely other words, many of them\n" * 30)
    refused(capfd, tiny.arguments(run_dir, *settings), "the tokenizer of", f"{run_dir} was trained")
    refused(capfd, ["eval", "--run", str(run_dir)], "the tokenizer of", f"{run_dir} was trained")


def test_a_batch_that_devices_do_not_divide(tiny, tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    done = tiny.train(tmp_path / "run", "--train.batch_size", "3", XLA_FLAGS=flags)
    assert done.status == 2
    assert "3 rows of a microbatch do not spread evenly over 2 places" in done.err
    assert "--train.batch_size" in done.err
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint(tiny, begun, capfd):
    shutil.rmtree(begun / "checkpoints")
    for command in ("eval", "generate"):
        refused(capfd, [command, "--run", str(begun)], f"{begun} has no checkpoint yet")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 4) as place:
        yield place


def test_a_disk_that_is_full_at_the_start(tiny, small_disk, capfd):
    fill(small_disk, leave=100_000)
    refused(capfd, tiny.arguments(small_disk / "run"), str(small_disk / "run"), "make room")
    assert not (small_disk / "run").exists()
    cache = small_disk / "cache"
    fill(small_disk)
    refused(capfd, tiny.arguments(small_disk / "run", "--data.cache", str(cache)), str(cache))


def test_a_disk_that_fills_up_loses_nothing(tiny, whole, small_disk, tmp_path):
    from tests.training.tiny import same_run, wait_for

    run_dir = small_disk / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "latte", *tiny.arguments(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    record = run_dir / "metrics.jsonl"
    wait_for(process, lambda: record.exists() and record.read_bytes().count(b"\n") > 12)
    fill(small_disk)
    _, err = process.communicate(timeout=100)
    assert process.returncode in (1, 2)
    said = err.splitlines()
    assert len(said) == 1, err
    said = said[0]
    assert "the disk" in said
    assert "full" in said
    assert "run the same command again" in said
    # Again, while the disk is still full: nothing of the run may be lost.
    full = subprocess.run(
        [sys.executable, "-m", "latte", *tiny.arguments(run_dir)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert full.returncode == 2
    assert str(small_disk) in full.stderr
    (small_disk / "filler").unlink()
    again = subprocess.run(
        [sys.executable, "-m", "latte", *tiny.arguments(run_dir)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert again.returncode == 0, again.stderr
    same_run(whole, run_dir)
