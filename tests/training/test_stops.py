"""kill -9 and SIGTERM at any moment: the run goes on as if it had never been stopped."""

import random
import signal

import pytest

from tests.training.tiny import Tiny, same_run, wait_for


def lines(run_dir) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saving(run_dir) -> bool:
    """A checkpoint is being written."""
    return any("tmp" in path.name for path in run_dir.glob("checkpoints/*"))


def kill_at(tiny: Tiny, run_dir, moment, *settings: str) -> bool:
    """Starts the run and kills it at `moment`; False where it ended before."""
    process = tiny.start(run_dir, *settings)
    wait_for(process, moment)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def no_rubbish(run_dir) -> None:
    """What a killed process left half-written is gone."""
    assert not saving(run_dir)
    assert not (run_dir / "damaged").exists()


def test_killed_runs_go_on_bitwise(tiny, whole, tmp_path):
    run_dir, dice = tmp_path / "killed", random.Random()
    first = dice.randint(2, 30)
    print("killed at step", first)
    assert kill_at(tiny, run_dir, lambda: lines(run_dir) >= first)
    before = lines(run_dir)
    # Soon after a checkpoint begins, of which the run that goes on must not be misled.
    assert kill_at(tiny, run_dir, lambda: lines(run_dir) > before + 3 and saving(run_dir))
    tiny.train(run_dir).ok()
    same_run(whole, run_dir)
    no_rubbish(run_dir)


@pytest.mark.slow
def test_killed_with_dropout_and_microbatches(tiny, tmp_path):
    settings = ["--model.dropout", "0.1", "--train.accumulate", "2", "--train.sample_tokens", "0"]
    tiny.train(tmp_path / "never", *settings).ok()
    run_dir, step = tmp_path / "killed", random.randint(6, 50)
    print("killed at step", step)
    assert kill_at(tiny, run_dir, lambda: lines(run_dir) >= step, *settings)
    tiny.train(run_dir, *settings).ok()
    for name in ("never", "killed"):
        (tmp_path / name / "samples.txt").touch()
    same_run(tmp_path / "never", run_dir)


def test_sigterm_saves_and_the_run_goes_on_bitwise(tiny, whole, tmp_path):
    run_dir = tmp_path / "asked"
    process = tiny.start(run_dir)
    wait_for(process, lambda: lines(run_dir) >= 13)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 0
    saved = max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert out.splitlines()[-1] == (
        f"asked to stop: saved step {saved}; the same command goes on from there"
    )
    tiny.train(run_dir).ok()
    same_run(whole, run_dir)


def test_an_evaluation_that_a_kill_came_before_is_made_up_for(tiny, whole, tmp_path):
    """The last checkpoint is there, its evaluation is not, and the sample is half there."""
    import shutil

    run_dir = tmp_path / "killed"
    shutil.copytree(whole, run_dir)
    records = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_bytes(b"".join(records[:-1]) + records[-1][:30])
    text = (whole / "samples.txt").read_text()
    (run_dir / "samples.txt").write_text(text[: text.index("--- step 60") + 15])
    (run_dir / "plots" / "loss.png").unlink()
    tiny.train(run_dir).ok()
    same_run(whole, run_dir)
    assert (run_dir / "plots" / "loss.png").exists()


@pytest.mark.slow
def test_twenty_kills(tiny, whole, tmp_path):
    """At any moment, the start included; progress is not asked of every start."""
    import time

    run_dir, dice = tmp_path / "killed", random.Random(0)
    for _ in range(20):
        process = tiny.start(run_dir)
        after = lines(run_dir)
        if dice.random() < 0.3:
            time.sleep(dice.uniform(0, 6))
        else:
            more = dice.randint(0, 8)
            wait_for(process, lambda a=after, m=more: lines(run_dir) > a + m)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    tiny.train(run_dir).ok()
    same_run(whole, run_dir)
    no_rubbish(run_dir)
