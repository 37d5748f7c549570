"""The state of Latte: what it holds, one step of it, and how two of them merge."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from latte.ops.chunk import accumulator, products
from latte.ops.segments import EMPTY


class LatteState(NamedTuple):
    """What Latte keeps of a document's past, a constant number of bytes.

    m: the largest key logit seen, −∞ where none was. A point of reference without gradient:
        a function of the state depends on m + l alone, and l carries the gradient of both.
    l: log Σ exp(k − m) over the tokens seen.
    s: the mixture of their values, weighted by exp(k − m − l).
    segment: the segment id of the last token.
    """

    m: Float[Array, "B H N"]
    l: Float[Array, "B H N"]
    s: Float[Array, "B H N D"]
    segment: Int[Array, " B"]


def empty_state(
    batch: int, heads: int, latents: int, size: int, dtype: DTypeLike = jnp.float32
) -> LatteState:
    """The state that has seen no token."""
    return LatteState(
        m=jnp.full((batch, heads, latents), -jnp.inf, dtype),
        l=jnp.zeros((batch, heads, latents), dtype),
        s=jnp.zeros((batch, heads, latents, size), dtype),
        segment=jnp.full((batch,), EMPTY, jnp.int32),
    )


def step(
    state: LatteState,
    p: Float[Array, "B H N"],
    k: Float[Array, "B H N"],
    v: Float[Array, "B H D"],
    first: Bool[Array, " B"],
) -> tuple[LatteState, Float[Array, "B H D"]]:
    """One token: the recurrence of the package's docstring."""
    before = jnp.where(first[:, None, None], -jnp.inf, state.m)
    m = jax.lax.stop_gradient(jnp.maximum(before, k))
    carried = jnp.exp(jax.lax.stop_gradient(before) - m + state.l)
    new = jnp.exp(k - m)
    total = carried + new
    past = jnp.where(first[:, None, None, None], 0, state.s)
    s = (carried / total)[..., None] * past + (new / total)[..., None] * v[:, :, None]
    y = jnp.einsum("bhn,bhnd->bhd", p, s, precision=jax.lax.Precision.HIGHEST)
    return LatteState(m, jnp.log(total), s, state.segment), y


def scan_tokens(
    state: LatteState, tokens: tuple[Array, ...]
) -> tuple[Float[Array, "T B H D"], LatteState]:
    """The recurrence, one token after another: `tokens` are p, k, v and first, time in front."""

    def body(state: LatteState, token: tuple) -> tuple[LatteState, Array]:
        return step(state, *token)

    after, y = jax.lax.scan(body, state, tokens)
    return y, LatteState(*after)


def read_apart(
    k: Float[Array, "B T H N"], v: Float[Array, "B T H D"], segment_ids: Int[Array, "B T"]
) -> LatteState:
    """The state after these tokens, of the last document only, as if none came before them."""
    last = segment_ids[:, -1]
    own = segment_ids == last[:, None]
    k = jnp.where(own[..., None, None], k.astype(accumulator(v.dtype)), -jnp.inf)
    m = jax.lax.stop_gradient(jnp.max(k, axis=1))
    weights = jnp.exp(k - m[:, None])
    total = jnp.sum(weights, axis=1)
    s = products(v.dtype)("bthn,bthd->bhnd", weights, v) / total[..., None]
    return LatteState(m, jnp.log(total), s, last)


def merge(left: LatteState, right: LatteState) -> LatteState:
    """The state of a sequence from the states of its two parts, read apart; associative.

    Parts of different documents merge to the right one. Two empties give an empty, with zero
    gradient.
    """
    apart = (left.segment != right.segment) & (right.segment != EMPTY)
    before = jnp.where(apart[:, None, None], -jnp.inf, left.m)
    m = jax.lax.stop_gradient(jnp.maximum(before, right.m))
    base = jnp.where(jnp.isneginf(m), 0, m)
    parts = [
        jnp.exp(jax.lax.stop_gradient(part) - base + l)
        for part, l in ((before, left.l), (right.m, right.l))
    ]
    total = parts[0] + parts[1]
    total = jnp.where(jnp.isneginf(m), 1, total)
    past = jnp.where(apart[:, None, None, None], 0, left.s)
    s = (parts[0] / total)[..., None] * past + (parts[1] / total)[..., None] * right.s
    segment = jnp.where(right.segment == EMPTY, left.segment, right.segment)
    return LatteState(m, jnp.log(total), s, segment)
