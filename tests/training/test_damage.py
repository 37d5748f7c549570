"""Damaged checkpoints, in a run and apart from one."""

import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.checkpoint import Checkpoints, Keep
from latte.errors import UserError
from tests.training.tiny import same_run


def largest(folder: Path) -> Path:
    """The file of a checkpoint that holds most of its arrays."""
    return max((p for p in folder.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_damaged_checkpoints_are_named_and_the_one_before_them_used(tiny, whole, tmp_path):
    run_dir = tmp_path / "damaged"
    shutil.copytree(whole, run_dir)
    truncate(largest(run_dir / "checkpoints" / "60" / "model"))
    largest(run_dir / "checkpoints" / "55").unlink()
    lines = tiny.train(run_dir).ok().err.splitlines()
    for step, line in zip((60, 55), lines, strict=True):
        assert line.startswith(f"latte: checkpoint {run_dir}/checkpoints/{step} is damaged (")
        assert line.endswith(f"moved to {run_dir}/damaged/{step}; the one before it is used")
    same_run(whole, run_dir)
    assert sorted(p.name for p in (run_dir / "damaged").iterdir()) == ["55", "60"]


def test_where_all_are_damaged_nothing_is_touched(tiny, whole, tmp_path):
    run_dir = tmp_path / "damaged"
    shutil.copytree(whole, run_dir)
    for step in ("50", "55", "60"):
        truncate(largest(run_dir / "checkpoints" / step / "model"))
    record = (run_dir / "metrics.jsonl").read_bytes()
    done = tiny.train(run_dir)
    assert done.status == 2
    [said] = done.err.splitlines()
    assert "every checkpoint in" in said
    assert "is damaged (step 60: " in said
    assert len(list((run_dir / "checkpoints").iterdir())) == 3
    assert (run_dir / "metrics.jsonl").read_bytes() == record


def state(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "weight": jnp.asarray(rng.standard_normal((64, 128)), jnp.float32),
        "count": jnp.asarray(seed, jnp.int32),
    }


@partial(jax.jit, donate_argnums=0)
def move(state: dict) -> dict:
    return jax.tree.map(lambda x: x * 3 + 1, state)


@pytest.fixture
def saved(tmp_path) -> Path:
    """Checkpoints of steps 1 to 3."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=Keep(3))
    for step in (1, 2, 3):
        checkpoints.save(step, {"state": state(step)})
    checkpoints.close()
    return tmp_path / "run" / "checkpoints"


def restored_step(folder: Path, keep: Keep | None = None) -> int:
    found = Checkpoints(folder, keep).restore({"state": state(0)})
    assert found is not None
    for name, array in found[0]["state"].items():
        assert np.array_equal(array, state(found[1])[name])
    return found[1]


def test_restored_arrays_are_those_that_were_saved_while_steps_went_on(tmp_path):
    """Steps give their buffers away while the background still writes from them."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=Keep(30))
    now, saved = state(0), {}
    for step in range(30):
        saved[step] = jax.tree.map(np.array, now)
        checkpoints.save(step, {"state": now})
        now = move(now)
    checkpoints.close()
    for step in reversed(range(30)):
        found = Checkpoints(tmp_path / "checkpoints").restore({"state": state(0)})
        assert found is not None
        assert found[1] == step
        for name, array in found[0]["state"].items():
            assert np.asarray(array).tobytes() == saved[step][name].tobytes()
        shutil.rmtree(tmp_path / "checkpoints" / str(step))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damage_to_any_file_is_survived(saved, damage, caplog):
    """Either the checkpoint is left out, or what is read from it is right all the same."""
    files = [p.relative_to(saved) for p in (saved / "3").rglob("*") if p.is_file()]
    assert len(files) > 5
    left_out = 0
    for file in files:
        copy = saved.parent.parent / "copy" / "checkpoints"
        shutil.copytree(saved, copy)
        damage(copy / file)
        caplog.clear()
        step = restored_step(copy)
        assert step in (2, 3), file
        left_out += step == 2
        named = [r.getMessage() for r in caplog.records if r.name == "latte.checkpoint"]
        assert len(named) == (step == 2)
        assert all(str(copy / "3") in words for words in named)
        shutil.rmtree(copy.parent)
    assert left_out


def test_reading_changes_nothing_and_writing_moves_away(saved):
    truncate(largest(saved / "3"))
    assert restored_step(saved) == 2
    assert (saved / "3").exists()
    assert restored_step(saved, keep=Keep(3)) == 2
    assert not (saved / "3").exists()
    assert (saved.parent / "damaged" / "3").exists()
    checkpoints = Checkpoints(saved, keep=Keep(3))
    checkpoints.save(3, {"state": state(3)})
    checkpoints.close()
    assert restored_step(saved) == 3


def test_half_written_checkpoints_are_left_out_and_cleared_away(saved):
    half = saved / "4.orbax-checkpoint-tmp-17"
    shutil.copytree(saved / "3", half)
    assert restored_step(saved) == 3
    assert half.exists()  # its writer may still be at work
    assert restored_step(saved, keep=Keep(3)) == 3
    Checkpoints(saved, keep=Keep(3)).close()
    assert not half.exists()


def test_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path / "none").restore({"state": state(0)}) is None
    assert not (tmp_path / "none").exists()
    assert Checkpoints(tmp_path / "new", keep=Keep(1)).restore({"state": state(0)}) is None


def test_all_damaged(saved):
    for step in "123":
        truncate(largest(saved / step))
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(step 3: "):
        Checkpoints(saved, keep=Keep(3)).restore({"state": state(0)})
    assert len(list(saved.iterdir())) == 3


def test_the_newest_the_regular_and_the_best_stay(tmp_path):
    keep = Keep(newest=2, every=4)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep)
    for step in range(1, 12):
        checkpoints.save(step, {"state": state(step)})
        checkpoints.wait()
        keep.note(step, float(abs(step - 6)))
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4, 6, 8, 10, 11]
