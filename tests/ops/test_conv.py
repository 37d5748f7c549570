import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops.conv import ConvState, conv, empty_state, reference
from tests.ops import helpers


def make(rng, batch, length, width, taps, state=True):
    """Inputs, and a state that some earlier call of a few tokens may have left."""
    ids = helpers.segments(rng, batch, length)
    inputs = {
        "x": rng.normal(size=(batch, length, width)),
        "weight": rng.normal(size=(taps, width)),
        "bias": rng.normal(size=width),
        "segment_ids": ids,
    }
    if state:
        seen = rng.integers(0, taps + 1, batch)
        known = np.arange(taps - 1)[None] >= taps - 1 - seen[:, None]
        before = rng.normal(size=(batch, taps - 1, width)) * known[..., None]
        segment = np.where(rng.random(batch) < 0.6, ids[:, 0], rng.integers(0, 3, batch))
        segment = np.where(seen == 0, -1, segment)
        inputs["state"] = ConvState(before, segment.astype(np.int32))
    return inputs


def call(op, **options):
    return lambda inputs: op(**inputs, **options)


@settings(max_examples=6, deadline=None)
@given(helpers.shapes(length=20), st.integers(1, 5), helpers.seeds, st.booleans())
def test_shifted_sums_are_the_definition(shape, taps, seed, causal):
    rng = np.random.default_rng(seed)
    compare = helpers.comparison(
        call(conv, impl="xla", causal=causal), call(reference, causal=causal)
    )
    for _ in range(5):
        compare(make(rng, *shape, taps, state=causal))


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_one_document_is_numpys_convolution(taps, causal):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(1, 9, 1)), rng.normal(size=(taps, 1))
    y, _ = conv(jnp.float32(x), jnp.float32(weight), causal=causal)
    ahead = 0 if causal else (taps - 1) // 2
    expected = np.convolve(x[0, :, 0], weight[:, 0])[ahead : ahead + 9]
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_leaks(causal):
    rng = np.random.default_rng(1)
    ids = jnp.asarray(np.cumsum(rng.random((2, 31)) < 0.2, axis=1), jnp.int32)
    weight = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 31, 2)), jnp.float32)
    helpers.assert_no_leak(
        lambda x: conv(x, weight, segment_ids=ids, causal=causal)[0], x, ids, causal=causal
    )


@pytest.mark.parametrize("taps", [1, 3, 5])
def test_pieces_with_the_state_carried_are_the_whole(taps, x64):
    rng = np.random.default_rng(2)
    length = 24
    weight = jnp.asarray(rng.normal(size=(taps, 2)))

    @jax.jit
    def op(x, ids, state):
        return conv(x, weight, segment_ids=ids, state=state)

    single = [(t, t + 1) for t in range(length)]
    for points in (single, *(helpers.split_points(rng, length) for _ in range(6))):
        inputs = helpers.to(make(rng, 3, length, 2, taps), jnp.float64)
        arguments = inputs["x"], inputs["segment_ids"], inputs["state"]
        helpers.assert_close(helpers.in_pieces(op, *arguments, points), op(*arguments), 1e-12)


def test_pieces_cut_where_documents_end():
    rng = np.random.default_rng(3)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, 9, 2), (3, 2)))
    ids = jnp.asarray([[0] * 4 + [1] * 2 + [0] * 3])

    def op(x, ids, state):
        return conv(x, weight, segment_ids=ids, state=state)

    arguments = x, ids, empty_state(1, 2, 3)
    pieces = helpers.in_pieces(op, *arguments, [(0, 4), (4, 6), (6, 9)])
    helpers.assert_close(pieces, op(*arguments), 1e-6)


def test_bfloat16():
    rng = np.random.default_rng(4)
    inputs = helpers.to(make(rng, 2, 20, 3, 4), jnp.bfloat16)
    (y, state), gradients = helpers.outputs_and_gradients(call(conv))(inputs)
    assert (y.dtype, state.inputs.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)
    expected, _ = reference(**helpers.to(inputs, jnp.float32))
    assert helpers.error(y, expected) < 1e-2


def test_a_centred_convolution_takes_no_state():
    x, weight = jnp.ones((1, 4, 2)), jnp.ones((3, 2))
    with pytest.raises(ValueError, match="no state"):
        conv(x, weight, state=empty_state(1, 2, 3), causal=False)
    _, state = conv(x, weight, causal=False)
    helpers.assert_close(state, empty_state(1, 2, 3), 0.0)
