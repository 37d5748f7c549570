"""Disasters at random moments, one after another: each ends as it should, and nothing is lost.

    pytest tests/training/test_survival.py -m slow --rounds 20

runs as many of them on a run of four processes; without --rounds each kind once.
"""

import random
import signal
from itertools import pairwise

import pytest

from tests.training.disk import fill, mounted
from tests.training.pod import Pod
from tests.training.test_damage import largest
from tests.training.test_processes import PATIENCE, WITHIN, same_losses
from tests.training.tiny import losses

COUNT, ROUND = 4, 6
"""Processes, and steps until the next disaster: never fewer than between two checkpoints."""


def lost(pod: Pod, victim: int) -> None:
    """The others end in bounded time and name it."""
    for process in set(range(COUNT)) - {victim}:
        done = pod.wait(process, WITHIN)
        assert done.status == 1, (process, done.err)
        last = done.err.splitlines()[-1]
        assert last.startswith(f"latte: process {victim} on "), done.err


def kill(pod: Pod, victim: int) -> None:
    pod.send(victim, signal.SIGKILL)
    lost(pod, victim)


def freeze(pod: Pod, victim: int) -> None:
    pod.send(victim, signal.SIGSTOP)
    lost(pod, victim)
    pod.send(victim, signal.SIGKILL)


def ask(pod: Pod, victim: int) -> None:
    """All save the same step and end well."""
    pod.send(victim, signal.SIGTERM)
    said = pod.wait(0).ok().out.splitlines()[-1]
    pod.all_ok()
    newest = max(int(p.name) for p in (pod.run_dir / "checkpoints").iterdir())
    assert said.startswith(f"asked to stop: saved step {newest};")


def fill_disk(pod: Pod, victim: int) -> None:
    """Whoever meets it says so, and the others that it ended."""
    del victim
    disk = pod.run_dir.resolve().parent
    fill(disk)
    done = [pod.wait(process, 120) for process in range(COUNT)]
    (disk / "filler").unlink()
    assert all(one.status in (1, 2) for one in done), [one.err for one in done]
    assert any("full" in one.err for one in done), [one.err for one in done]


def lose_shard(pod: Pod, victim: int) -> None:
    """A file of the newest checkpoint is gone: the next start names it and takes the one before."""
    ask(pod, victim)
    newest = max((pod.run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))
    largest(newest).unlink()


DISASTERS = (kill, ask, freeze, fill_disk, lose_shard)


@pytest.mark.slow
def test_nothing_is_lost(tiny, pods, tmp_path, request):
    rounds = request.config.getoption("--rounds")
    dice = random.Random()
    settings = (
        *("--train.steps", str(2 * ROUND * (rounds + 1)), "--train.eval_every", "1000000"),
        *("--train.sample_tokens", "0", "--train.tensorboard", "false"),
    )
    alone = tmp_path / "alone"
    tiny.train(alone, *settings).ok()
    order = [*DISASTERS] * (rounds // len(DISASTERS) + 1)
    with mounted(tmp_path / "disk", 32) as disk:
        run_dir, before = tmp_path / "run", None
        (disk / "run").mkdir()
        run_dir.symlink_to(disk / "run")  # what the processes say is not on this disk
        for number, disaster in enumerate(order[:rounds]):
            pod = pods(tiny, run_dir, COUNT, *settings, *PATIENCE, "--mesh.fsdp", "8")
            known = max((step for step, _ in losses(run_dir)), default=0) if number else 0
            step, victim = known + dice.randint(1, ROUND), dice.randrange(COUNT)
            print(f"{disaster.__name__} {victim} at step {step}", flush=True)
            pod.wait_for_step(step)
            disaster(pod, victim)
            if before is lose_shard:
                assert "is damaged" in pod.error(0)
            before = disaster
        said = tiny.train(run_dir, *settings).ok().err
        assert ("is damaged" in said) == (before is lose_shard)
        same_losses(run_dir, alone)
        steps = [step for step, _ in losses(run_dir)]
        assert all(b - a == 1 for a, b in pairwise(steps))
