"""Bad steps, and when the host reads what a step reports."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.checkpoint import Keep
from latte.cli import main
from latte.config import apply_overrides, load
from latte.data.loader import Loader
from latte.data.prepare import prepare
from latte.mesh import make_mesh
from latte.metrics import Metrics, read_metrics
from latte.monitor import Monitor
from latte.run import checkpoints_of, resolve
from latte.train import _LATE, _Loop, _Stop, initial_state, loss_and_gradients, train_step
from tests.training.tiny import Tiny

SMALL = [
    *("--model.pattern", "latte", "--model.layers", "1", "--model.width", "8"),
    *("--train.sample_tokens", "0", "--train.tensorboard", "false"),
]


def small(tiny: Tiny, *settings: str):
    """The config of a still smaller model, and its store."""
    config = apply_overrides(load(str(tiny.config)), [*SMALL, *settings])
    store = prepare(config.data)
    return resolve(config, store.tokenizer), store


def batches(config, store, first: int = 0):
    train = config.train
    loader = Loader(store, "train", train.seed, train.batch_size, train.sequence_length)
    return loader.iterate(first)


def test_a_bad_step_leaves_all_as_it_was(tiny):
    config, store = small(tiny)
    step = jax.jit(partial(train_step, config))
    stream = batches(config, store)
    state, _ = step(initial_state(config), next(stream))
    batch = next(stream)
    poisoned = batch._replace(weights=batch.weights * np.float32(np.nan))
    after, report = step(state, poisoned)
    assert not np.isfinite(report.loss)
    assert int(report.skipped) == int(after.optim.skipped) == 1
    assert int(after.step) == 2
    before = (state.model, state.optim._replace(skipped=jnp.asarray(1, jnp.int32)))
    for one, other in zip(
        jax.tree.leaves(before), jax.tree.leaves((after.model, after.optim)), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    third, report = step(after, batch)
    assert int(report.skipped) == int(third.optim.skipped) == 0
    assert np.isfinite(report.loss)


def run_of_bad_steps(tiny, run_dir: Path, capfd, *settings: str) -> tuple[str, str, list[dict]]:
    capfd.readouterr()
    assert main(tiny.arguments(run_dir, *SMALL, "--optim.max_skips", "5", *settings)) == 1
    out, err = capfd.readouterr()
    [said] = err.splitlines()
    return out, said, list(read_metrics(run_dir / "metrics.jsonl"))


def test_a_rate_that_breaks_the_model_ends_the_run(tiny, tmp_path, capfd):
    settings = ("--optim.lr", "1e30", "--optim.warmup", "0", "--train.checkpoint_every", "1")
    out, said, records = run_of_bad_steps(tiny, tmp_path / "run", capfd, *settings)
    skipped = [r["skipped"] for r in records if "loss" in r]
    assert skipped == [0, 1, 2, 3, 4, 5]
    for step in range(2, 7):
        assert re.search(rf"^step {step} skipped: loss \S+, gradient norm nan$", out, re.M)
    # Step 1 was applied and left a broken model: its checkpoint is no good one.
    assert "5 steps in a row were skipped, up to step 6: there is no good checkpoint" in said
    assert "--optim.lr" in said


@pytest.mark.slow
def test_the_last_good_checkpoint_is_named_and_kept(tiny, tmp_path, capfd):
    """Gradients hardly above their mean count as spikes here, and a high rate makes them noisy."""
    settings = ["--optim.lr", "0.1", "--optim.spike", "1.0001", "--optim.max_skips", "1"]
    run_dir = tmp_path / "run"
    settings += ["--train.steps", "200"]
    settings += ["--train.checkpoint_every", "2", "--train.eval_every", "200"]
    _, said, records = run_of_bad_steps(tiny, run_dir, capfd, *settings)
    last = records[-1]["step"]
    assert last > 50
    assert [r["skipped"] for r in records] == [0] * (last - 1) + [1]
    good = (last - 2) // 2 * 2
    assert f"1 steps in a row were skipped, up to step {last}: " in said
    assert f"the last good checkpoint is {good} in {run_dir}/checkpoints" in said
    assert (run_dir / "checkpoints" / str(good)).exists()
    assert not (run_dir / "checkpoints" / str(last)).exists()


def test_reports_are_read_late_in_order_and_all_of_them(tiny, tmp_path):
    """When the batch of a step is asked for, the steps under way have not been waited for."""
    config, store = small(tiny, "--train.steps", "12", "--train.checkpoint_every", "8")
    run_dir, read = tmp_path / "run", []
    run_dir.mkdir()
    keep = Keep(1)
    checkpoints = checkpoints_of(run_dir, keep)

    def watched():
        for batch in batches(config, store):
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            read.append([json.loads(line)["step"] for line in lines])
            yield batch

    one = jax.set_mesh(make_mesh(config.mesh, jax.devices()[:1]))
    with one, Metrics(run_dir, config) as metrics, _Stop() as stop:
        state = jax.jit(partial(initial_state, config))()
        monitor = Monitor(run_dir, config.train.patience)
        loop = _Loop(config, run_dir, store, checkpoints, keep, metrics, monitor, state)
        loop.run(watched(), stop)
    checkpoints.close()
    for begun, steps in enumerate(read):
        before_checkpoint = 8 if begun >= 8 else 0  # of which all are read
        assert steps == list(range(1, max(begun - _LATE, before_checkpoint) + 1)), begun
    records = [r["step"] for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r]
    assert records == list(range(1, 13))


@pytest.mark.parametrize("accumulate", ["2", "4"])
def test_microbatches_give_the_step_of_the_whole_batch(tiny, accumulate):
    results = []
    for settings in ((), ("--train.accumulate", accumulate)):
        config, store = small(tiny, *settings)
        state, report = jax.jit(partial(train_step, config))(
            initial_state(config), next(batches(config, store))
        )
        results.append((report.loss, report.grad_norm, jax.tree.leaves(state.model)))
    (loss, norm, model), (other_loss, other_norm, other_model) = results
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    np.testing.assert_allclose(norm, other_norm, rtol=1e-5)
    for one, other in zip(model, other_model, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_microbatches_with_unlike_numbers_of_targets_give_the_gradients_of_the_whole(tiny):
    """The mean is over targets, not over microbatches."""
    results = []
    for accumulate in ("1", "2"):
        config, store = small(tiny, "--train.accumulate", accumulate)
        batch = next(batches(config, store))
        shares = np.array([[0.1], [0.9], [0.0], [0.5]] * 2)
        weights = np.random.default_rng(0).random(batch.weights.shape) < shares
        batch = batch._replace(weights=weights.astype(np.float32))
        model, step = initial_state(config).model, jnp.zeros((), jnp.int32)
        results.append(jax.jit(partial(loss_and_gradients, config))(model, batch, step))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
