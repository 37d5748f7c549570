"""Schedules, AdamW and the rule for bad steps, against their definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte import optim
from latte.config import OptimConfig
from latte.cost import shapes
from tests.models import MODELS
from tests.ops import helpers

STEPS = 100


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        # By step, counted from 1: shares of the peak.
        ("cosine", {1: 0.1, 9: 0.9, 10: 1, 40: 0.775, 55: 0.55, 70: 0.325, 100: 0.1, 500: 0.1}),
        ("linear", {1: 0.1, 9: 0.9, 10: 1, 28: 0.82, 55: 0.55, 100: 0.1, 500: 0.1}),
        ("wsd", {1: 0.1, 9: 0.9, 10: 1, 11: 1, 80: 1, 81: 0.955, 90: 0.55, 100: 0.1, 500: 0.1}),
        ("constant", {1: 0.1, 9: 0.9, 10: 1, 55: 1, 100: 1, 500: 1}),
    ],
)
def test_schedules_have_these_values(schedule, shares):
    config = OptimConfig(lr=0.5, warmup=10, decay=0.2, final=0.1, schedule=schedule)
    for step, share in shares.items():
        rate = optim.learning_rate(config, STEPS, jnp.asarray(step - 1))
        assert rate.dtype == jnp.float32
        np.testing.assert_allclose(rate, 0.5 * share, rtol=1e-6, err_msg=str(step))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_no_warmup_and_nothing_but_warmup_end_where_they_should(schedule):
    none = OptimConfig(lr=1.0, warmup=0, final=0.0, decay=1.0, schedule=schedule)
    last = optim.learning_rate(none, STEPS, jnp.asarray(STEPS - 1))
    np.testing.assert_allclose(last, 1.0 if schedule == "constant" else 0.0, atol=1e-6)
    assert float(optim.learning_rate(none, STEPS, jnp.asarray(0))) > 0.98
    whole = OptimConfig(lr=1.0, warmup=STEPS, schedule=schedule)
    rates = [float(optim.learning_rate(whole, STEPS, jnp.asarray(t))) for t in (0, 49, 99)]
    np.testing.assert_allclose(rates, [0.01, 0.5, 1.0], rtol=1e-6)


def model_like(name: str, seed: int):
    """Random numbers in the place of a model's parameters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes(MODELS[name])
    )


def names_of(tree) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


@pytest.mark.parametrize("name", MODELS)
def test_matrices_decay_and_nothing_else(name):
    """Matrices have a row an input: norms, biases, Λ, taps and position tables are no such."""
    model = shapes(MODELS[name])
    leaves, decays = jax.tree.leaves(model), jax.tree.leaves(optim.decays(model))
    left_out = set()
    for leaf, path, pulled in zip(leaves, names_of(model), decays, strict=True):
        vector = leaf.ndim - ("blocks" in path) < 2  # blocks are stacked
        assert pulled != (vector or path.endswith((".taps", "position_table"))), path
        left_out |= set() if pulled else {path.rpartition(".")[2]}
    assert left_out <= {"scale", "bias", "lam", "taps", "position_table"}


def adamw(config: OptimConfig, model, gradients, rates):
    """Loshchilov and Hutter (2019), algorithm 2, in float64 over a list of leaves and of steps."""
    decays = jax.tree.leaves(optim.decays(model))
    leaves = []
    for i, x in enumerate(jax.tree.leaves(model)):
        x = np.asarray(x, np.float64)
        m = v = np.zeros_like(x)
        for t, (grads, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = np.asarray(grads[i], np.float64)
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * g**2
            direction = m / (1 - config.beta1**t)
            direction = direction / (np.sqrt(v / (1 - config.beta2**t)) + config.epsilon)
            x = x - rate * (direction + (config.weight_decay * x if decays[i] else 0))
        leaves.append(x)
    return leaves


def updater(config: OptimConfig):
    return jax.jit(partial(optim.update, config))


FINE = jnp.asarray(1.0)
"""A rate, or a loss."""


@pytest.mark.parametrize("name", ["latte_r", "latte_conv"])
def test_steps_are_adamw(name):
    """With an ε that matters, and gradients clipped as by hand."""
    config = OptimConfig(beta1=0.8, beta2=0.9, epsilon=0.05, weight_decay=0.3, clip=2.0)
    model, rates = model_like(name, 0), [0.1, 0.01, 0.3]
    state, update, clipped = optim.init(config, model), updater(config), []
    now = model
    for t, rate in enumerate(rates):
        grads = jax.tree.map(lambda g: g * 0.01**t, model_like(name, 1 + t))  # noqa: B023
        norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
        clipped.append([g * min(1, 2.0 / norm) for g in jax.tree.leaves(grads)])
        now, state, reported, applied = update(now, grads, state, rate=jnp.asarray(rate), loss=FINE)
        np.testing.assert_allclose(reported, norm, rtol=1e-5)
        assert applied
    assert int(state.applied) == 3
    expected = adamw(config, model, clipped, rates)
    start = [np.asarray(x, np.float64) for x in jax.tree.leaves(model)]
    moved = [x - y for x, y in zip(jax.tree.leaves(now), start, strict=True)]
    helpers.assert_close(moved, [x - y for x, y in zip(expected, start, strict=True)], 1e-5)


@pytest.mark.parametrize(("clip", "share"), [(0.0, 1.0), (1e9, 1.0), (1e-3, None)])
def test_clipping_bounds_the_norm_and_keeps_the_direction(clip, share):
    config = OptimConfig(clip=clip, beta1=0.9)
    model, grads = model_like("latte", 0), model_like("latte", 1)
    after = updater(config)(model, grads, optim.init(config, model), rate=FINE, loss=FINE)
    share = clip / float(after.grad_norm) if share is None else share
    expected = jax.tree.map(lambda g: 0.1 * share * g, grads)
    helpers.assert_close(after.state.adam[0].mu, expected, 1e-5)


def assert_same_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("bad", ["nan loss", "inf loss", "nan gradient", "inf gradient", "spike"])
def test_a_bad_step_changes_nothing_but_its_count(bad):
    config = OptimConfig(spike=10.0)
    model, grads = model_like("latte", 0), model_like("latte", 1)
    update = updater(config)
    _, state, norm, _ = update(model, grads, optim.init(config, model), rate=FINE, loss=FINE)
    state = state._replace(applied=jnp.asarray(50, jnp.int32))
    loss = jnp.asarray({"nan loss": np.nan, "inf loss": np.inf}.get(bad, 1.0))
    worse = jax.tree.map(lambda g: 10.01 * g if bad == "spike" else g, grads)
    if bad.endswith("gradient"):
        value = np.nan if bad == "nan gradient" else np.inf
        leaves, structure = jax.tree.flatten(grads)
        worse = jax.tree.unflatten(structure, [*leaves[:-1], leaves[-1].at[0].set(value)])
    before = state
    for count in (1, 2):
        after = update(model, worse, state, rate=FINE, loss=loss)
        assert not after.applied
        assert int(after.state.skipped) == count
        assert_same_bits(after.model, model)
        assert_same_bits(after.state._replace(skipped=before.skipped), before)
        state = after.state
    good = update(model, grads, state, rate=FINE, loss=FINE)
    assert good.applied
    assert int(good.state.skipped) == 0
    np.testing.assert_allclose(good.grad_norm, norm)


@pytest.mark.parametrize(
    ("spike", "times", "applied", "good"),
    [(10.0, 9.99, 50, True), (10.0, 10.01, 49, True), (0.0, 1e6, 50, True), (2.0, 2.01, 50, False)],
)
def test_a_spike_is_so_many_times_the_mean_once_there_is_one(spike, times, applied, good):
    config = OptimConfig(spike=spike)
    model, grads = model_like("latte", 0), model_like("latte", 1)
    state = optim.init(config, model)
    update = updater(config)
    norm = update(model, grads, state, rate=FINE, loss=FINE).grad_norm
    state = state._replace(norm=norm / times, applied=jnp.asarray(applied, jnp.int32))
    assert bool(update(model, grads, state, rate=FINE, loss=FINE).applied) == good


def test_the_mean_of_norms_is_plain_at_first_and_then_fades():
    config = OptimConfig(spike=0.0)
    model, grads = model_like("latte", 0), model_like("latte", 1)
    state, update, norms = optim.init(config, model), updater(config), []
    for step in range(60):
        scaled = jax.tree.map(lambda g: g * (1.0 + step), grads)  # noqa: B023
        _, state, norm, _ = update(model, scaled, state, rate=FINE, loss=FINE)
        norms.append(float(norm))
        mean = np.mean(norms) if step < 50 else 0.98 * mean + 0.02 * norms[-1]
        np.testing.assert_allclose(state.norm, mean, rtol=1e-4)
