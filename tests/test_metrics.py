"""What a run reports, and that a killed run's report can be gone on with."""

import importlib.util
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from latte.config import Config, TrainConfig
from latte.errors import UserError
from latte.metrics import JsonLines, Metrics, naming_a_full_disk, read_metrics, truncate_after
from latte.speed import Speed, peak_flops


def config(**train) -> Config:
    settings = {"steps": 20, "batch_size": 2, "sequence_length": 8, "log_every": 5} | train
    return Config(name="a_run", train=TrainConfig(**settings))


def report(run_dir: Path, first: int, last: int, **console) -> str:
    """Reports the steps of a run that did `first` before; returns what the terminal showed."""
    shown = io.StringIO()
    with Metrics(run_dir, config(), first, Console(file=shown, width=100, **console)) as metrics:
        for step in range(first + 1, last + 1):
            metrics.log_step(step, {"loss": np.float32(1 / step), "tokens_per_second": 32.0})
            if step % 10 == 0:
                metrics.log_eval(step, {"heldout_loss": 0.5, "latent_entropy": [0.1, 0.2]})
        metrics.say("[b]done[/b]")
        metrics.sync()
    return shown.getvalue()


def test_losses_read_back_to_the_same_bits(tmp_path):
    rng = np.random.default_rng(0)
    losses = rng.integers(0, 2**31, 500, dtype=np.uint32).view(np.float32)
    losses = losses[np.isfinite(losses)]
    lines = JsonLines(tmp_path / "m.jsonl")
    for step, loss in enumerate(losses):
        lines.write(step, {"loss": loss.item()})
    lines.close()
    back = np.array([r["loss"] for r in read_metrics(tmp_path / "m.jsonl")], np.float32)
    assert back.tobytes() == losses.tobytes()


def test_what_is_not_finite_becomes_null(tmp_path):
    with Metrics(tmp_path, config(tensorboard=False)) as metrics:
        metrics.log_step(1, {"loss": math.nan, "norm": np.float32(np.inf), "skipped": True})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": null, "norm": null, "skipped": true}\n'


def test_a_run_that_goes_on_reports_as_one_that_never_stopped(tmp_path):
    report(tmp_path / "whole", 0, 20)
    report(tmp_path / "killed", 0, 17)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "lo')  # torn by the kill
    report(tmp_path / "killed", 12, 20)
    whole, killed = (tmp_path / n / "metrics.jsonl" for n in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()
    assert [r["step"] for r in read_metrics(whole)].count(10) == 2
    assert len(json.loads((tmp_path / "killed" / "environment.json").read_text())) == 2
    assert list((tmp_path / "killed" / "tensorboard").iterdir())


WRITER = """
import sys, pathlib
from latte.metrics import JsonLines
lines = JsonLines(pathlib.Path(sys.argv[1]))
step = 0
while True:
    step += 1
    lines.write(step, {"loss": 1 / step})
"""


def test_kill_leaves_whole_lines_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        until = time.monotonic() + 20
        while not (path.exists() and path.stat().st_size > 10_000):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    steps = [r["step"] for r in read_metrics(path)]
    assert steps == list(range(1, len(steps) + 1))
    truncate_after(path, 100)
    assert [r["step"] for r in read_metrics(path)] == list(range(1, 101))
    assert path.read_bytes().endswith(b"\n")


def test_plain_lines_without_a_terminal(tmp_path):
    lines = report(tmp_path, 0, 20).splitlines()
    assert lines == [
        "step 5/20  loss 0.2000  32 tokens/s  0:08 left",
        "step 10/20  loss 0.1000  32 tokens/s  0:05 left",
        "step 15/20  loss 0.0667  32 tokens/s  0:02 left",
        "step 20/20  loss 0.0500  32 tokens/s  0:00 left",
        "[b]done[/b]",
    ]


def test_a_bar_on_a_terminal(tmp_path):
    shown = report(tmp_path, 0, 20, force_terminal=True, color_system=None)
    assert "20/20" in shown
    assert "loss 0.0500  32 tokens/s  0:00 left" in shown
    assert "[b]done[/b]" in shown


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"the disk that holds .*metrics.jsonl is full"):
        lines.write(1, {"loss": 1.0})
    lines.close()
    with pytest.raises(PermissionError), naming_a_full_disk(tmp_path):
        raise PermissionError


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(UserError, match="wandb is not installed"):
        Metrics(tmp_path, config(wandb="project"))


def test_environment_says_what_ran(tmp_path):
    report(tmp_path, 0, 1)
    [entry] = json.loads((tmp_path / "environment.json").read_text())
    assert entry["packages"]["jax"]
    assert entry["devices"] >= 1
    assert entry["device_kind"]
    assert entry["python"] == ".".join(map(str, sys.version_info[:3]))


# --- speed


def test_speed_over_the_last_steps():
    now = 0.0
    speed = Speed(100, 1e9, "NVIDIA H200", 2, window=2, clock=lambda: now)
    assert speed.update(1) == {}
    now = 2.0
    assert speed.update(2)["tokens_per_second"] == 50
    now = 3.0
    speed.update(3)
    now = 4.0
    last = speed.update(4)
    assert last["tokens_per_second"] == 100
    assert last["mfu"] == pytest.approx(100 * 1e9 / (2 * 989e12))
    speed.restart()
    assert speed.update(5) == {}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("TPU v4 lite", None),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_peak_flops(kind, peak):
    assert peak_flops(kind) == peak
