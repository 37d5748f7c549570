"""A run that takes seconds, and the processes that do it."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from latte.metrics import read_metrics

CONFIG = """
from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="tiny",
    model=ModelConfig(
        width=32, layers=2, heads=2, latents=4, window=8, ff=64, dtype="float32", remat="none"
    ),
    data=DataConfig(path={text!r}, tokenizer="bytes", heldout=0.2, cache={cache!r}),
    optim=OptimConfig(lr=3e-3, warmup=4),
    train=TrainConfig(
        steps=60,
        batch_size=8,
        sequence_length=32,
        eval_every=20,
        eval_tokens=300,
        checkpoint_every=5,
        sample_tokens=16,
    ),
)
"""
ENVIRONMENT = {**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""What is compiled once, the other runs of the session find again."""


@dataclass(frozen=True)
class Tiny:
    """A folder with a corpus, a config file and runs."""

    folder: Path

    @property
    def text(self) -> Path:
        return self.folder / "text"

    @property
    def config(self) -> Path:
        return self.folder / "tiny.py"

    def arguments(self, run_dir: Path, *settings: str) -> list[str]:
        return ["train", "--config", str(self.config), "--run-dir", str(run_dir), *settings]

    def start(self, run_dir: Path, *settings: str, **environment: str) -> subprocess.Popen:
        """Begins a run in a process of its own, which also writes to run_dir.err."""
        with run_dir.with_suffix(".err").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "latte", *self.arguments(run_dir, *settings)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=ENVIRONMENT | environment,
            )

    def train(self, run_dir: Path, *settings: str, **environment: str) -> "Done":
        """A whole run."""
        process = self.start(run_dir, *settings, **environment)
        out, _ = process.communicate(timeout=600)
        return Done(process.returncode, out, run_dir.with_suffix(".err").read_text())


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def ok(self) -> "Done":
        assert self.status == 0, self.err
        return self


def make_tiny(folder: Path, cache: Path) -> Tiny:
    """Writes the corpus, eight short files, and the config."""
    tiny = Tiny(folder)
    tiny.text.mkdir()
    dice, words = random.Random(0), ("the", "a", "cat", "dog", "sat", "on", "mat", "off", "né")
    for name in "abcdefgh":
        line = dice.choices(words, k=150)
        (tiny.text / f"{name}.txt").write_text(" ".join(line) + "\n")
    tiny.config.write_text(CONFIG.format(text=str(tiny.text), cache=str(cache)))
    return tiny


def losses(run_dir: Path) -> list[tuple[int, str]]:
    """(step, loss) of all lines of steps, as text, so that all bits count."""
    records = read_metrics(run_dir / "metrics.jsonl")
    return [(r["step"], repr(r["loss"])) for r in records if "loss" in r]


def batches(run_dir: Path) -> list[tuple[int, str]]:
    """(step, hash of the global batch) of all lines of steps."""
    records = read_metrics(run_dir / "metrics.jsonl")
    return [(r["step"], r["batch"]) for r in records if "loss" in r]


def evaluations(run_dir: Path) -> list[dict]:
    return [r for r in read_metrics(run_dir / "metrics.jsonl") if "heldout_loss" in r]


def same_run(one: Path, other: Path) -> None:
    """Asserts that two runs report the same, bit for bit, each step once."""
    steps = [step for step, _ in losses(other)]
    assert steps == list(range(1, len(steps) + 1))
    assert losses(one) == losses(other)
    assert batches(one) == batches(other)
    assert evaluations(one) == evaluations(other)
    assert (one / "samples.txt").read_text() == (other / "samples.txt").read_text()


def wait_for(process: subprocess.Popen, happened: Callable[[], bool]) -> None:
    """Returns when something happened, or the process has ended."""
    until = time.monotonic() + 600
    while not happened() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.002)
