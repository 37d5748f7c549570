"""The state of Macchiato: those of its two parts."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from latte.ops.attention import AttentionState
from latte.ops.attention import empty_state as empty_attention_state
from latte.ops.latte.state import LatteState
from latte.ops.latte.state import empty_state as empty_latte_state
from latte.ops.segments import EMPTY, Runs


class MacchiatoState(NamedTuple):
    """The states of the two parts."""

    latents: LatteState
    window: AttentionState


def empty_state(
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T G D"],
    kw: Float[Array, "B T G K"],
    window: int,
    dtype: DTypeLike = jnp.float32,
) -> MacchiatoState:
    """The state before the first of these tokens; sums are of type `dtype`."""
    batch, _, heads, latents = k.shape
    groups, size = v.shape[2:]
    cache = empty_attention_state(batch, window - 1, groups, kw.shape[-1], size, v.dtype)
    return MacchiatoState(empty_latte_state(batch, heads, latents, size, dtype), cache)


def cached_runs(state: AttentionState) -> Int[Array, "B S"]:
    """Run numbers of the tokens in a cache: those of the document that may go on have 0."""
    return jnp.where(state.seen, 0, EMPTY)


def window_after(
    before: AttentionState, kw: Float[Array, "B T G K"], v: Float[Array, "B T G D"], runs: Runs
) -> AttentionState:
    """The cache after the last token, which has as many places as the one before the first."""
    length, room = kw.shape[1], before.k.shape[1]

    def last(past: Array, x: Array) -> Array:
        new = x[:, max(length - room, 0) :]
        return jnp.concatenate([past[:, length:].astype(x.dtype), new], axis=1)

    run = last(cached_runs(before), runs.run)
    return AttentionState(last(before.k, kw), last(before.v, v), run == runs.run[:, -1:], runs.last)
