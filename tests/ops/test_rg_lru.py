import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops.rg_lru import RGLRUState, empty_state, reference, rg_lru
from tests.ops import helpers

KINDS = ("normal", "zero", "large", "jumps", "mixed")


def make(rng, batch, length, width, kind="normal"):
    """Inputs, and a state of which some rows are empty or of another document."""
    shape = (batch, length, width)
    ids = helpers.segments(rng, batch, length)
    segment = np.where(rng.random(batch) < 0.6, ids[:, 0], rng.integers(-1, 3, batch))
    return {
        "x": rng.normal(size=shape),
        "r": helpers.logits(rng, kind, shape),
        "i": helpers.logits(rng, kind, shape),
        "lam": helpers.logits(rng, kind, (width,), axis=0),
        "segment_ids": ids,
        "state": RGLRUState(
            np.where(segment[:, None] < 0, 0, rng.normal(size=(batch, width))),
            segment.astype(np.int32),
        ),
    }


def call(op, **options):
    return lambda inputs: op(**inputs, **options)


def check(reverse=False):
    return helpers.comparison(
        call(rg_lru, impl="xla", reverse=reverse), call(reference, reverse=reverse)
    )


@settings(max_examples=4, deadline=None)
@given(helpers.shapes(), helpers.seeds, st.booleans())
def test_chunked_is_the_definition(shape, seed, reverse):
    check(reverse)(make(np.random.default_rng(seed), *shape))


@pytest.mark.parametrize("reverse", [False, True])
def test_chunked_is_the_definition_on_hard_gates(reverse):
    rng = np.random.default_rng(0)
    compare = check(reverse)
    for kind in KINDS * 3:
        compare(make(rng, 3, 45, 4, kind))


@pytest.mark.parametrize("length", [1, 300])
def test_extreme_gates_are_exact_and_finite(length):
    rng = np.random.default_rng(0)
    compare = check()
    for gate in (-1e4, 1e4):
        for lam in (-1e4, 1e4):
            inputs = make(rng, 2, length, 3)
            r, lam = np.full_like(inputs["r"], gate), np.full_like(inputs["lam"], lam)
            compare(inputs | {"r": r, "lam": lam})


def test_gradient_of_nearly_open_gates_agrees_with_differences():
    """Where a is near 1 the multiplier is steep: the derivative itself, not only its finiteness."""
    with jax.enable_x64(True):
        x, i = jnp.ones((1, 2, 1)), jnp.zeros((1, 2, 1))

        def last(r, lam):
            return rg_lru(x, jnp.full((1, 2, 1), r), i, lam[None])[0][0, 1, 0]

        r, lam, step = jnp.float64(-20.0), jnp.float64(-9.0), 1e-4
        for k, gradient in enumerate(jax.grad(last, (0, 1))(r, lam)):
            d = step * jnp.eye(2)[k]
            difference = last(r + d[0], lam + d[1]) - last(r - d[0], lam - d[1])
            assert gradient != 0
            np.testing.assert_allclose(gradient, difference / (2 * step), rtol=1e-5)


def test_long_memory_in_float32():
    """a within 1e-6 of 1 over 8,192 tokens: products over chunks keep their digits."""
    rng = np.random.default_rng(1)
    inputs = make(rng, 1, 8192, 2)
    inputs |= {"segment_ids": np.zeros((1, 8192), np.int32), "lam": np.array([-16.0, -9.0])}
    check()(inputs)


@pytest.mark.parametrize("reverse", [False, True])
def test_nothing_leaks(reverse):
    rng = np.random.default_rng(2)
    length = 37
    inputs = helpers.to(make(rng, 2, length, 2), jnp.float32)
    ids = jnp.asarray(np.cumsum(rng.random((2, length)) < 0.15, axis=1), jnp.int32)

    def y(tree):
        x, r, i = (jnp.flip(z, 1) if reverse else z for z in tree)
        segment_ids = jnp.flip(ids, 1) if reverse else ids
        h, _ = rg_lru(x, r, i, inputs["lam"], segment_ids=segment_ids, reverse=reverse)
        return jnp.flip(h, 1) if reverse else h

    helpers.assert_no_leak(y, (inputs["x"], inputs["r"], inputs["i"]), ids)


@pytest.mark.parametrize("h_of", ["another document", "the same document"])
def test_the_state_reaches_its_own_document_only(h_of):
    rng = np.random.default_rng(3)
    inputs = helpers.to(make(rng, 1, 20, 2), jnp.float32)
    ids = jnp.asarray([[4] * 12 + [5] * 8])
    segment = jnp.asarray([4 if h_of == "the same document" else 5], jnp.int32)

    def h_at(h, t):
        inputs_ = inputs | {"segment_ids": ids, "state": RGLRUState(h, segment)}
        return rg_lru(**inputs_)[0][0, t].sum()

    gradient = jax.jit(jax.vmap(jax.grad(h_at), (None, 0)))
    reach = (gradient(jnp.ones((1, 2)), jnp.asarray([0, 3, 12, 19])) != 0).any((1, 2))
    assert reach.tolist() == [h_of == "the same document"] * 2 + [False] * 2


def test_pieces_with_the_state_carried_are_the_whole(x64):
    rng = np.random.default_rng(9)

    @jax.jit
    def op(sequences, ids, state):
        return rg_lru(*sequences, lam, segment_ids=ids, state=state)

    lam = jnp.asarray(rng.normal(size=2))
    single = [(t, t + 1) for t in range(37)]
    for points in (single, *(helpers.split_points(rng, 37) for _ in range(6))):
        fresh = helpers.to(make(rng, 3, 37, 2), jnp.float64)
        arguments = (fresh["x"], fresh["r"], fresh["i"]), fresh["segment_ids"], fresh["state"]
        helpers.assert_close(helpers.in_pieces(op, *arguments, points), op(*arguments), 1e-12)


def test_pieces_cut_where_documents_end():
    rng = np.random.default_rng(4)
    inputs = helpers.to(make(rng, 2, 12, 2), jnp.float32)
    ids = jnp.asarray([[0] * 4 + [1] * 5 + [0] * 3] * 2)

    @jax.jit
    def op(sequences, ids, state):
        return rg_lru(*sequences, inputs["lam"], segment_ids=ids, state=state)

    arguments = (inputs["x"], inputs["r"], inputs["i"]), ids, inputs["state"]
    pieces = helpers.in_pieces(op, *arguments, [(0, 4), (4, 9), (9, 12)])
    helpers.assert_close(pieces, op(*arguments), 1e-6)


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_reverse_is_forward_of_the_flipped_sequence(impl):
    rng = np.random.default_rng(5)
    inputs = helpers.to(make(rng, 2, 41, 3), jnp.float32)
    h, state = rg_lru(**inputs, impl=impl, reverse=True)
    flipped = {k: jnp.flip(inputs[k], 1) for k in ("x", "r", "i", "segment_ids")}
    h_, state_ = rg_lru(**(inputs | flipped), impl=impl)
    helpers.assert_close((h, state), (jnp.flip(h_, 1), state_), 1e-6)


def test_the_first_token_of_a_document_is_its_gated_input():
    x = jnp.full((1, 2, 1), 3.0)
    zero = jnp.zeros_like(x)
    h, _ = rg_lru(x, zero, zero, jnp.zeros(1), segment_ids=jnp.asarray([[0, 1]]))
    np.testing.assert_allclose(h, x / 2, rtol=1e-6)


def test_bfloat16_keeps_its_state_in_float32():
    rng = np.random.default_rng(6)
    inputs = make(rng, 2, 50, 4)
    narrow = helpers.to(inputs, jnp.bfloat16)
    narrow["lam"], narrow["state"] = helpers.to((inputs["lam"], inputs["state"]), jnp.float32)
    (h, state), gradients = helpers.outputs_and_gradients(call(rg_lru))(narrow)
    assert (h.dtype, state.h.dtype) == (jnp.bfloat16, jnp.float32)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)
    expected, _ = reference(**helpers.to(narrow, jnp.float32))
    assert helpers.error(h, expected) < 1e-2


def test_without_a_state_or_segments():
    rng = np.random.default_rng(7)
    inputs = helpers.to(make(rng, 2, 9, 3), jnp.float32)
    del inputs["segment_ids"], inputs["state"]
    state = empty_state(2, 3)
    zeros = jnp.zeros((2, 9), jnp.int32)
    expected = rg_lru(**inputs, state=state, segment_ids=zeros)
    helpers.assert_close(rg_lru(**inputs), expected, 0.0)


def test_an_implementation_asked_for_by_name_never_falls_back():
    rng = np.random.default_rng(8)
    inputs = helpers.to(make(rng, 1, 2, 1), jnp.float32)
    with pytest.raises(ValueError, match=r"rg_lru has Pallas kernels for .* and this is"):
        rg_lru(**inputs, impl="pallas")
