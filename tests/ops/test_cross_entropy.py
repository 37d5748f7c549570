import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops.cross_entropy import chunk_length, cross_entropy, reference, token_losses
from tests.ops import helpers

V = 11


def make(rng, batch, length, width, vocabulary=V, scale=1.0):
    return {
        "hidden": rng.normal(size=(batch, length, width)) * scale,
        "table": rng.normal(size=(vocabulary, width)),
        "targets": rng.integers(0, vocabulary, (batch, length)).astype(np.int32),
        "weights": rng.random((batch, length)) * (rng.random((batch, length)) < 0.8),
    }


def losses(op, **options):
    """The loss, differentiated, and other sums as they are; weights are not differentiated."""

    def f(inputs):
        sums = op(**inputs | {"weights": jax.lax.stop_gradient(inputs["weights"])}, **options)
        return sums.loss, jax.lax.stop_gradient((sums.nll, sums.z, sums.weight))

    return f


@settings(max_examples=5, deadline=None)
@given(
    helpers.shapes(length=20),
    st.integers(1, 25) | st.none(),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 2.0]),
    helpers.seeds,
)
def test_chunked_is_the_definition(shape, chunk, z_loss, softcap, seed):
    rng = np.random.default_rng(seed)
    options = {"z_loss": z_loss, "softcap": softcap}
    compare = helpers.comparison(
        losses(cross_entropy, chunk=chunk, **options), losses(reference, **options)
    )
    for scale in (0.0, 1.0, 10.0):
        compare(make(rng, *shape, scale=scale))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_of_ten_thousand_are_exact(softcap):
    rng = np.random.default_rng(0)
    inputs = make(rng, 2, 9, 3)
    inputs["hidden"] = 1e4 * np.sign(inputs["hidden"])
    inputs["table"] = np.eye(V, 3)
    options = {"softcap": softcap}
    helpers.comparison(losses(cross_entropy, **options), losses(reference, **options))(inputs)


def test_correct_counts_targets_of_the_largest_logit():
    inputs = helpers.to(make(np.random.default_rng(6), 2, 40, 3), jnp.float32)
    best = jnp.argmax(inputs["hidden"] @ inputs["table"].T, -1)
    expected = jnp.sum(inputs["weights"] * (best == inputs["targets"]))
    np.testing.assert_allclose(cross_entropy(**inputs).correct, expected, rtol=1e-6)
    equal = inputs | {"hidden": jnp.zeros_like(inputs["hidden"])}
    np.testing.assert_allclose(cross_entropy(**equal).correct, inputs["weights"].sum(), rtol=1e-6)


def test_losses_of_tokens():
    rng = np.random.default_rng(1)
    inputs = helpers.to(make(rng, 2, 13, 4), jnp.float32)
    hidden, table, targets = inputs["hidden"], inputs["table"], inputs["targets"]
    nll = token_losses(hidden, table, targets, softcap=3.0)
    for t in range(13):
        weights = jnp.zeros((2, 13)).at[1, t].set(1)
        expected = reference(hidden, table, targets, weights, softcap=3.0).nll
        np.testing.assert_allclose(nll[1, t], expected, rtol=1e-5)


def test_no_array_holds_all_logits():
    """And the check would see one: it does in the definition, which holds them."""
    batch, length, vocabulary = 3, 26, 37
    inputs = helpers.to(make(np.random.default_rng(2), batch, length, 5, vocabulary), jnp.float32)

    def backward(op):
        return jax.value_and_grad(
            lambda h, t: op(**inputs | {"hidden": h, "table": t}).loss, (0, 1)
        )

    def tokens(h, t):
        return token_losses(h, t, inputs["targets"])

    arguments = inputs["hidden"], inputs["table"]
    everything = batch * length * vocabulary
    assert max(helpers.array_sizes(backward(reference), *arguments)) >= everything
    for f in (
        backward(cross_entropy),
        lambda h, t: cross_entropy(**inputs | {"hidden": h, "table": t}),
        tokens,
        jax.grad(lambda h, t: tokens(h, t).sum(), (0, 1)),
    ):
        assert max(helpers.array_sizes(f, *arguments)) < everything


def test_nothing_is_paid_for_gradients_that_nobody_asks_for():
    inputs = helpers.to(make(np.random.default_rng(3), 2, 16, 5), jnp.float32)

    def products(f, *args):
        return str(jax.make_jaxpr(f)(*args)).count("dot_general")

    def loss(table):
        return cross_entropy(**inputs | {"table": table}).loss

    assert products(loss, inputs["table"]) == 1
    assert products(jax.grad(loss), inputs["table"]) == 3


@pytest.mark.parametrize(
    ("batch", "length", "vocabulary"), [(1, 1, 7), (8, 256, 4096), (80, 1025, 50_267)]
)
def test_chunks_are_within_the_row_and_waste_little(batch, length, vocabulary):
    chunk = chunk_length(batch, length, vocabulary)
    assert 1 <= chunk <= max(1, (length + 1) // 2)
    assert -length % chunk < 0.05 * length + 1


def test_it_works_inside_scan_vmap_and_jit():
    rng = np.random.default_rng(4)
    inputs = helpers.to([make(rng, 2, 7, 3) for _ in range(3)], jnp.float32)
    stacked = jax.tree.map(lambda *z: jnp.stack(z), *inputs)

    def gradient(one):
        return jax.grad(lambda h: cross_entropy(**one | {"hidden": h}).loss)(one["hidden"])

    one_by_one = jnp.stack([gradient(one) for one in inputs])
    helpers.assert_close(jax.jit(jax.vmap(gradient))(stacked), one_by_one, 1e-6)
    helpers.assert_close(jax.jit(lambda s: jax.lax.map(gradient, s))(stacked), one_by_one, 1e-6)


def test_bfloat16_multiplies_narrow_and_sums_wide():
    rng = np.random.default_rng(5)
    inputs = helpers.to(make(rng, 2, 30, 16), jnp.float32)
    narrow = inputs | {"hidden": inputs["hidden"].astype(jnp.bfloat16)}
    sums, gradients = helpers.outputs_and_gradients(losses(cross_entropy))(narrow)
    expected, expected_gradients = helpers.outputs_and_gradients(losses(reference))(inputs)
    assert sums[0].dtype == jnp.float32
    assert {g.dtype for g in gradients} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    helpers.assert_close(sums[0], expected[0], 1e-2)
    helpers.assert_close(gradients, expected_gradients, 2e-2)
