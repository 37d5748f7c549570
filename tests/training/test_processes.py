"""Runs of several processes: their losses, and how they end when one of them does."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.training.test_damage import largest, truncate
from tests.training.tiny import batches, losses

ROWS = ("--train.steps", "40", "--train.sample_tokens", "0")
ENDLESS = ("--train.steps", "1000000", "--train.eval_every", "1000000")
PATIENCE = ("--train.patience", "6")
WITHIN = 6 + 40
"""Seconds in which the others end: the patience, and the end itself on a busy machine."""
MESHES = {
    "data": ("--mesh.data", "4"),
    "fsdp": ("--mesh.fsdp", "4"),
    "context": ("--mesh.context", "4"),
    "tensor": ("--mesh.tensor", "2"),
    "mixed": ("--mesh.fsdp", "2", "--mesh.context", "2"),
}


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory) -> Path:
    """The run by one process on one device."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    tiny.train(run_dir, *ROWS).ok()
    return run_dir


def same_losses(run_dir: Path, other: Path) -> None:
    """Each step once, of the same batch to the bit, and its loss to 1e-5."""
    assert batches(run_dir) == batches(other)
    ours, theirs = ([(s, float(x)) for s, x in losses(d)] for d in (run_dir, other))
    assert [s for s, _ in ours] == [s for s, _ in theirs]
    np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_two_processes_give_the_losses_of_one(tiny, alone, pods, tmp_path, mesh):
    pods(tiny, tmp_path / "run", 2, *ROWS, *MESHES[mesh]).all_ok()
    same_losses(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes_and_another_mesh(tiny, alone, pods, tmp_path):
    """SIGTERM to one of two: both save the same step and end well; one process goes on."""
    run_dir = tmp_path / "run"
    pod = pods(tiny, run_dir, 2, *ROWS, *MESHES["mixed"])
    pod.wait_for_step(7)
    pod.send(1, signal.SIGTERM)
    pod.all_ok()
    saved = max(int(p.name) for p in (run_dir / "checkpoints").iterdir())
    assert f"asked to stop: saved step {saved}" in pod.wait(0).out
    assert 7 <= saved < 40
    tiny.train(run_dir, *ROWS).ok()
    same_losses(run_dir, alone)


def test_a_killed_process_is_named_by_the_others(tiny, pods, tmp_path):
    pod = pods(tiny, tmp_path / "run", 2, *ENDLESS, *PATIENCE)
    pod.wait_for_step(3)
    pod.send(1, signal.SIGKILL)
    done = pod.wait(0, WITHIN)
    assert done.status == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("latte: process 1 on ")
    assert "has given no sign of life for 6 s" in last


@pytest.mark.slow
def test_a_frozen_process_is_named_by_the_others(tiny, pods, tmp_path):
    pod = pods(tiny, tmp_path / "run", 2, *ENDLESS, *PATIENCE)
    pod.wait_for_step(30)
    pod.send(1, signal.SIGSTOP)
    done = pod.wait(0, WITHIN)
    assert done.status == 1
    assert "latte: process 1 on " in done.err.splitlines()[-1]
    # A step that does not end is looked into before that.
    assert "thread" in (tmp_path / "run" / "stacks-0.txt").read_text().lower()


@pytest.mark.slow
def test_the_first_process_is_named_too_when_it_is_killed(tiny, pods, tmp_path):
    """With it JAX's own service is gone, and its client ends the others at once."""
    pod = pods(tiny, tmp_path / "run", 2, *ENDLESS, *PATIENCE)
    pod.wait_for_step(3)
    pod.send(0, signal.SIGKILL)
    done = pod.wait(1, WITHIN)
    assert done.status == 1, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("latte: process 0 on ")
    assert "is gone; process 1 on " in last


@pytest.mark.slow
def test_a_process_with_another_config_is_found_before_a_step(tiny, pods, tmp_path):
    pod = pods(tiny, tmp_path / "run", 2, *ROWS, *PATIENCE, p1=["--optim.lr", "0.5"])
    for process in range(2):
        done = pod.wait(process)
        assert done.status != 0
        assert "process 1 on" in done.err
        assert "optim.lr" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tiny, pods, tmp_path):
    """Of a full disk in one process, the other says that it was that one, and why."""
    run_dir = tmp_path / "run"
    pod = pods(tiny, run_dir, 2, *ENDLESS, *PATIENCE)
    pod.wait_for_step(3)
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").touch()
    assert pod.wait(0, 60).status == 1
    assert pod.wait(1, 60).status == 1
    assert "a checkpoint could not be written" in pod.error(0) + pod.error(1)


@pytest.mark.slow
def test_four_processes_then_two_then_one(tiny, alone, pods, tmp_path):
    run_dir = tmp_path / "run"
    for count, step, mesh in ((4, 8, ["--mesh.fsdp", "8"]), (2, 18, ["--mesh.tensor", "2"])):
        pod = pods(tiny, run_dir, count, *ROWS, *PATIENCE, *mesh)
        pod.wait_for_step(step)
        for process in pod.processes:
            process.kill()
            process.wait()
    tiny.train(run_dir, *ROWS).ok()
    same_losses(run_dir, alone)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_by_all(tiny, alone, pods, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(alone, run_dir)
    truncate(largest(run_dir / "checkpoints" / "40" / "model"))
    pod = pods(tiny, run_dir, 2, *ROWS, "--mesh.fsdp", "4")
    pod.all_ok()
    [said] = [line for line in pod.error(0).splitlines() if line.startswith("latte: ")]
    assert "checkpoints/40 is damaged" in said
    same_losses(run_dir, alone)
