"""Latte and Macchiato against the paper's equations, and how states of Latte merge."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.ops.latte import LatteState, bidirectional, empty_state, latte, merge, reference
from latte.ops.macchiato import macchiato
from tests.ops import helpers
from tests.ops.mixers import KINDS, logits


def softmax(z, axis=-1):
    e = np.exp(z - z.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def listing_1(q, k, v):
    """The paper's scan: sums of exp(k) and of exp(k) v under the running maximum of k."""
    p, peaks = softmax(q), np.maximum.accumulate(k, axis=1)
    values = np.zeros((*k[:, 0].shape, v.shape[-1]))
    sums, peak, ys = np.zeros_like(k[:, 0]), k[:, 0], []
    for t in range(k.shape[1]):
        revert, add = np.exp(peak - peaks[:, t]), np.exp(k[:, t] - peaks[:, t])
        sums = sums * revert + add
        values = values * revert[..., None] + add[..., None] * v[:, t, :, None]
        ys.append(np.einsum("bhn,bhnd->bhd", p[:, t] / sums, values))
        peak = peaks[:, t]
    return np.stack(ys, axis=1)


def equations_10_to_14(q, k, v):
    beta = np.exp(q).sum(axis=-1, keepdims=True)
    alpha = np.cumsum(np.exp(k), axis=1)
    weighted = np.cumsum(np.exp(k)[..., None] * v[:, :, :, None], axis=1)
    gamma = np.exp(q) / (beta * alpha)
    return np.einsum("bthn,bthnd->bthd", gamma, weighted)


def equations_15_to_17(q, k, v, qw, kw, window):
    """Every pair of tokens; equation 17's window is one less, so that it holds `window` keys."""
    length, p = q.shape[1], softmax(q)
    y = np.zeros((*q.shape[:3], v.shape[-1]))
    for t in range(length):
        seen = slice(max(0, t - window + 1), t + 1)
        near = softmax(np.einsum("bhk,bshk->bsh", qw[:, t], kw[:, seen]), axis=1)
        far = softmax(k[:, : t + 1], axis=1)
        y[:, t] = p[:, t, :, :1] * np.einsum("bsh,bshd->bhd", near, v[:, seen])
        y[:, t] += np.einsum("bhn,bshn,bshd->bhd", p[:, t, :, 1:], far, v[:, : t + 1])
    return y


def make(rng, length, kind="normal", latents=3):
    shapes = [(2, length, 2, n) for n in (latents, latents, 4)]
    q, k = (logits(rng, kind, shape) for shape in shapes[:2])
    return q, k, rng.normal(size=shapes[2])


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_the_papers_equations(impl, x64):
    rng = np.random.default_rng(0)
    q, k, v = make(rng, 100)
    y, _ = latte(*map(jnp.asarray, (q, k, v)), impl=impl)
    assert helpers.error(y, equations_10_to_14(q, k, v)) < 1e-12
    assert helpers.error(y, listing_1(q, k, v)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_papers_listing_on_hard_logits(kind, x64):
    q, k, v = make(np.random.default_rng(1), 100, kind)
    y, _ = latte(*map(jnp.asarray, (q, k, v)))
    assert helpers.error(y, listing_1(q, k, v)) < 1e-9


def test_equation_6_reads_the_whole_sequence(x64):
    q, k, v = make(np.random.default_rng(2), 100)
    expected = np.einsum("bthn,bshn,bshd->bthd", softmax(q), softmax(k, axis=1), v)
    assert helpers.error(bidirectional(*map(jnp.asarray, (q, k, v))), expected) < 1e-12


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_the_papers_window_and_latents_make_one_mixture(impl, x64):
    rng = np.random.default_rng(3)
    q, _, v = make(rng, 100, latents=4)
    k = rng.normal(size=(2, 100, 2, 3))
    qw, kw = rng.normal(size=(2, 2, 100, 2, 5))
    arrays = map(jnp.asarray, (q, k, v, qw, kw))
    y, _ = macchiato(*arrays, window=7, scale=1.0, impl=impl)
    assert helpers.error(y, equations_15_to_17(q, k, v, qw, kw, 7)) < 1e-12


def states(rng, kind, ids):
    """The states of parts of one sequence, each read apart, and of the whole; parts of 7 tokens."""
    ids = np.asarray(ids)
    arrays = [jnp.asarray(z) for z in make(rng, len(ids), kind)]

    @partial(jax.jit, static_argnums=(0, 1))
    def state_of(first, last):
        segments = jnp.asarray(np.stack([ids[first:last]] * 2))
        return latte(*(z[:, first:last] for z in arrays), segment_ids=segments)[1]

    parts = [state_of(s, s + 7) for s in range(0, len(ids), 7)]
    return parts, state_of(0, len(ids))


def sums(state: LatteState):
    return state.m + state.l, state.s, state.segment


DOCUMENTS = ([0] * 21, [0] * 7 + [1] * 14, [0] * 9 + [1] * 12, [0] * 3 + [1] * 12 + [2] * 6)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_merge_to_the_whole_in_any_order(kind, x64):
    rng = np.random.default_rng(4)
    for ids in DOCUMENTS:
        (a, b, c), whole = states(rng, kind, ids)
        left, right = merge(merge(a, b), c), merge(a, merge(b, c))
        helpers.assert_close(sums(left), sums(whole), 1e-12)
        helpers.assert_close(sums(right), sums(whole), 1e-12)


def test_another_document_leaves_nothing_of_the_one_before(x64):
    (a, b, _), _ = states(np.random.default_rng(5), "normal", [0] * 7 + [1] * 14)
    helpers.assert_close(merge(a, b), b, 1e-15)


def test_empty_states_merge_to_what_is_beside_them(x64):
    (a, *_), _ = states(np.random.default_rng(6), "jumps", [0] * 21)
    empty = empty_state(2, 2, 3, 4, jnp.float64)
    for merged in (merge(a, empty), merge(empty, a)):
        helpers.assert_close(sums(merged), sums(a), 1e-15)


def test_two_empty_states_are_empty_with_zero_gradient(x64):
    empty = empty_state(2, 2, 3, 4, jnp.float64)
    both = merge(empty, empty)
    jax.tree.map(np.testing.assert_array_equal, both, empty)

    def total(state, other):
        merged = merge(state, other)
        return jnp.sum(merged.l) + jnp.sum(merged.s)

    for gradient in jax.grad(total, (0, 1), allow_int=True)(empty, empty):
        for name in ("m", "l"):
            np.testing.assert_array_equal(getattr(gradient, name), 0)
        assert np.isfinite(gradient.s).all()


def test_merging_has_the_gradient_of_reading_on(x64):
    """By the state of two parts, against the same tokens read in one call."""
    rng = np.random.default_rng(7)
    q, k, v = (jnp.asarray(z) for z in make(rng, 14))
    weights = jnp.asarray(rng.normal(size=(2, 2, 3, 4)))

    def total(state):
        return jnp.sum(state.s * weights) + jnp.sum(jnp.sin(state.l + state.m))

    def merged(k, v):
        a, b = (latte(q[:, s], k[:, s], v[:, s])[1] for s in (slice(7), slice(7, 14)))
        return total(merge(a, b))

    def whole(k, v):
        return total(reference(q, k, v)[1])

    both = (jax.jit(jax.grad(f, (0, 1)))(k, v) for f in (merged, whole))
    helpers.assert_close(*both, 1e-11)
