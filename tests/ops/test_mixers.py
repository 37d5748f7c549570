"""One contract for Latte, attention and Macchiato, in each of their forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops.latte import LatteState
from tests.ops import helpers
from tests.ops.mixers import KINDS, MIXERS, Mixer, meaning

SHARE = 1e-2
"""A gradient of logits is a difference of terms as large as the gradient of v, and zero but for
their rounding where logits are all equal (S is the same for each latent, so dq is 0), where one
weight is all of a softmax, and for documents of one token. Its error is measured against at least
this share of the largest gradient."""

BOUNDARIES = (64, 128)
"""Where chunks end."""

all_mixers = pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.name)
carrying = pytest.mark.parametrize(
    "mixer", [mixer for mixer in MIXERS if mixer.carries], ids=lambda mixer: mixer.name
)


def documents(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Segment ids of documents that end anywhere, in the first row where chunks end."""
    ids = helpers.segments(rng, batch, length)
    ids[0] = np.digitize(np.arange(length), BOUNDARIES)
    return ids


def make(rng, mixer: Mixer, batch: int, length: int, **sizes) -> dict:
    ids = documents(rng, batch, length)
    arrays = mixer.arrays(rng, batch, length, **sizes)
    # The state is of the document that goes on, of another, or empty.
    segment = np.where(rng.random(batch) < 0.6, ids[:, 0], rng.integers(-1, 3, batch))
    state = mixer.past(rng, segment, **sizes) if mixer.carries else None
    return {"arrays": arrays, "segment_ids": ids, "state": state}


def check(mixer: Mixer):
    """A check that chunks are the definition on what `make` gives."""

    def run(impl):
        def f(inputs):
            y, state = mixer(**inputs, impl=impl)
            return y, meaning(state)

        return f

    return helpers.comparison(run("xla"), run("reference"), share=SHARE)


@all_mixers
def test_chunks_are_the_definition_on_hard_logits(mixer):
    """In most of these chunks a sum underflows, so that products of exponentials give 0/0."""
    rng = np.random.default_rng(0)
    compare = check(mixer)
    for kind in KINDS:
        for _ in range(3):
            compare(make(rng, mixer, 2, 131, kind=kind))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(MIXERS),
    st.integers(1, 3),
    st.integers(1, 200) | st.sampled_from([2, 63, 64, 65, 127, 128, 129]),
    st.integers(1, 5),
    st.integers(1, 5),
    helpers.seeds,
)
def test_chunks_are_the_definition_on_any_shape(mixer, batch, length, latents, size, seed):
    rng = np.random.default_rng(seed)
    compare = check(mixer)
    for kind in ("normal", "normal", "jumps"):
        compare(make(rng, mixer, batch, length, latents=latents, size=size, kind=kind))


@all_mixers
def test_chunks_are_the_definition_on_one_token_and_one_latent(mixer):
    rng = np.random.default_rng(1)
    compare = check(mixer)
    for kind in ("normal", "jumps"):
        compare(make(rng, mixer, 2, 1, latents=1, size=1, kind=kind))


@all_mixers
def test_equal_logits_read_the_mean_of_all_that_is_visible(mixer):
    """Over 8,192 tokens and without drift; the definitions of most ops hold T² numbers here."""
    length, rng = 8192, np.random.default_rng(2)
    ids = np.digitize(np.arange(length), [4096, 5000])[None]
    op = jax.jit(mixer)
    for kind in ("zero", "ten thousand"):
        arrays = mixer.arrays(rng, 1, length, latents=2, size=2, kind=kind)
        y, _ = op(helpers.to(arrays, jnp.float32), jnp.asarray(ids))
        expected = mean_of_visible(mixer, arrays["v"][0], ids[0])
        assert helpers.error(y[0], expected) < 1e-5


def mean_of_visible(mixer: Mixer, v: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """What equal logits give [T, H, D], from running sums of the values v [T, G, D]."""
    length = len(ids)
    starts, ends = (np.searchsorted(ids, ids, side=side) for side in ("left", "right"))
    t = np.arange(length)
    total = np.concatenate([np.zeros((1, *v.shape[1:])), np.cumsum(v, axis=0)])

    def mean(left, right):
        low = starts if left is None else np.maximum(starts, t - left)
        high = ends if right is None else np.minimum(ends, t + right + 1)
        return (total[high] - total[low]) / (high - low)[:, None, None]

    window = mixer.settings.get("window")
    if mixer.kind == "macchiato":
        near = mean(window - 1, 0 if mixer.causal else window - 1)
        share = 1 / 3  # of the window: it is one of three equal states
        expected = share * near + (1 - share) * mean(None, 0 if mixer.causal else None)
    elif isinstance(window, tuple):
        expected = mean(*window)
    else:
        expected = mean(None if window is None else window - 1, 0 if mixer.causal else None)
    return np.repeat(expected, mixer.heads // mixer.kv_heads, axis=1)


def test_latte_has_no_drift_over_8192_equal_logits():
    rng = np.random.default_rng(3)
    latte = MIXERS[0]
    compare = check(latte)
    for kind in ("zero", "ten thousand"):
        arrays = latte.arrays(rng, 1, 8192, latents=2, size=2, kind=kind)
        arrays["q"] = rng.normal(size=arrays["q"].shape)
        ids = np.zeros((1, 8192), np.int32)
        compare({"arrays": arrays, "segment_ids": ids, "state": None})


@carrying
def test_pieces_with_the_state_carried_are_the_whole(mixer, x64):
    rng = np.random.default_rng(4)
    length = 80

    op = jax.jit(mixer)

    sixteens = [(t, t + 16) for t in range(0, length, 16)]
    ones = [(t, t + 1) for t in range(length)]
    mixed = [*ones[:3], *[(t, t + 16) for t in (3, 19, 35)], *ones[51:64], (64, 80)]
    for points in (sixteens, ones, mixed):
        for kind in ("normal", "jumps"):
            inputs = make(rng, mixer, 3, length, kind=kind)
            # Documents end where the pieces do, and elsewhere.
            inputs["segment_ids"][1] = np.digitize(np.arange(length), [3, 16, 19, 40, 64, 65])
            if mixer.kind == "attention" and mixer.settings["window"] is None:
                inputs["state"] = with_room(inputs["state"], length)
            inputs = helpers.to(inputs, jnp.float64)
            arguments = inputs["arrays"], inputs["segment_ids"], inputs["state"]
            y, state = helpers.in_pieces(op, *arguments, points)
            expected, after = op(*arguments)
            helpers.assert_close((y, meaning(state)), (expected, meaning(after)), 1e-11)


def with_room(state, room):
    """A cache of full attention with place for `room` more tokens."""

    def grow(z):
        return np.pad(z, ((0, 0), (room, 0), *[(0, 0)] * (z.ndim - 2)))

    return state._replace(k=grow(state.k), v=grow(state.v), seen=grow(state.seen))


@all_mixers
def test_nothing_leaks(mixer):
    rng = np.random.default_rng(5)
    length = 100
    ids = jnp.asarray([np.digitize(np.arange(length), ends) for ends in ([1, 20, 64, 90], [40])])
    arrays = mixer.arrays(rng, 2, length, size=2)
    if mixer.kind != "attention":
        # Latents that jump within the first chunk send it through the recurrence.
        arrays["k"][0, :10] -= 1e4
        arrays["k"][1, :30] -= 1e4
    arrays = helpers.to(arrays, jnp.float32)
    causal, queries = mixer.causal, ("q", "qw")
    helpers.assert_no_leak(lambda z: mixer(z, ids)[0], arrays, ids, causal=causal, local=queries)


@carrying
def test_the_state_reaches_its_own_document_only(mixer):
    """By values up to rounding, which a state's largest logit may change: it sets a chunk's scale.

    By gradient to the bit.
    """
    rng = np.random.default_rng(6)
    ids = jnp.asarray([[1] * 5 + [2] * 66] * 2)
    arrays = helpers.to(mixer.arrays(rng, 2, 71), jnp.float32)
    # It goes on in the first row; in the second the document of its id comes too late.
    own = (np.arange(71) < 5) & (np.arange(2) == 0)[:, None]
    states = [helpers.to(mixer.past(rng, np.array([1, 2])), jnp.float32) for _ in range(2)]

    @jax.jit
    def run(state):
        def other_documents(state):
            y, _ = mixer(arrays, ids, state)
            return jnp.sum(jnp.where(own[:, :, None, None], 0, y) ** 2), y

        return jax.value_and_grad(other_documents, has_aux=True, allow_int=True)(state)

    ((_, y), gradient), ((_, other), _) = map(run, states)
    reached = np.abs(y - other).max(axis=(2, 3)) > 1e-6
    if mixer.settings.get("window") != 1:
        assert reached[0, 0]
    assert not (reached & ~own).any()
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jax.dtypes.float0 or not leaf.any()


@all_mixers
def test_no_array_holds_all_pairs_of_tokens(mixer):
    """And the check would see one: the definition has them, except where it is a recurrence."""
    length = 1024
    inputs = helpers.to(mixer.arrays(np.random.default_rng(7), 1, length, size=2), jnp.float32)

    def largest(impl):
        def total(arrays):
            return jnp.sum(mixer(arrays, None, impl=impl)[0] ** 2)

        return max(helpers.traced_sizes(jax.value_and_grad(total), inputs))

    assert largest("xla") < length**2
    if mixer.name != "latte":
        assert largest("reference") >= length**2


@all_mixers
def test_bfloat16_keeps_its_sums_wide(mixer):
    rng = np.random.default_rng(8)
    arrays = helpers.to(mixer.arrays(rng, 2, 70), jnp.bfloat16)
    run = jax.jit(lambda arrays, impl: mixer(arrays, None, impl=impl), static_argnums=1)
    y, state = run(arrays, "xla")
    assert y.dtype == jnp.bfloat16
    latents = getattr(state, "latents", state)
    if isinstance(latents, LatteState):
        assert latents.m.dtype == latents.l.dtype == latents.s.dtype == jnp.float32
    expected, _ = run(helpers.to(arrays, jnp.float32), "reference")
    assert helpers.error(y, expected) < 1e-2


@all_mixers
def test_an_implementation_asked_for_by_name_never_falls_back(mixer):
    arrays = helpers.to(mixer.arrays(np.random.default_rng(9), 1, 2), jnp.float32)
    with pytest.raises(ValueError, match=r"pallas.*reference.*xla|Pallas kernels"):
        mixer(arrays, None, impl="pallas")
