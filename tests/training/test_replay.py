"""Steps that are run twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.errors import RunFailedError
from latte.replay import replay


@jax.jit
def step(state, batch):
    return {"x": state["x"] * 2 + batch, "n": state["n"] + 1}, jnp.sum(batch)


STATE = {"x": jnp.ones((4, 3)), "n": jnp.zeros((), jnp.int32)}


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_replayed_run_is_the_run(every):
    state, run = STATE, replay(jax.jit(step, donate_argnums=0), every)
    state = jax.tree.map(jnp.copy, state)
    for i in range(1, 6):
        state, report = run(i, state, jnp.full((4, 3), i, jnp.float32))
        assert report == 12 * i
    np.testing.assert_array_equal(state["x"], 32 + 16 + 16 + 12 + 8 + 5)
    assert state["n"] == 5


def test_a_device_that_computes_wrongly_is_found():
    calls = 0

    def flips_a_bit(state, batch):
        nonlocal calls
        calls += 1
        state, report = step(state, batch)
        bits = state["x"].view(jnp.uint32).at[1, 2].add(calls == 4)
        return state | {"x": bits.view(jnp.float32)}, report

    run, state = replay(flips_a_bit, 2), STATE
    for i in (1, 2):
        state, _ = run(i, state, jnp.ones((4, 3)))
    state, _ = run(3, state, jnp.ones((4, 3)))
    calls = 3
    with pytest.raises(RunFailedError, match=r"step 4 was run twice .* \(1 of 2 arrays differ"):
        run(4, state, jnp.ones((4, 3)))
