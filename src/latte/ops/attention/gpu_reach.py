"""Which blocks of tokens a block of others must visit, and which of them it sees whole."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from latte.ops.attention.scores import Window


class Side(NamedTuple):
    """Tokens of one kind: their run numbers and how they are cut into blocks."""

    run: Int[Array, "B T"]
    block: int

    def extremes(self) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
        """The smallest and the largest run number of each block."""
        batch, length = self.run.shape
        run = jnp.pad(self.run, ((0, 0), (0, -length % self.block)), mode="edge")
        run = run.reshape(batch, -1, self.block)
        return run.min(axis=-1), run.max(axis=-1)


def bounds(own: Side, other: Side, offset: int, window: Window) -> Int[Array, "B n 4"]:
    """What a block of this side must visit of the other: from which block, up to which.

    Between them, in second and third place: from which block up to which all tokens see all.

    A token at x sees places x + offset − left to x + offset + right, and its own document only.
    Runs need not be in order: blocks before the first, and from the last on, overlap this one in no
    run, and those between the two in the middle hold this one's only run and no other.
    """
    low, high = own.extremes()
    other_low, other_high = other.extremes()
    count, block = other_low.shape[1], other.block
    until = jax.lax.cummax(other_high, axis=1)
    onwards = jax.lax.cummin(other_low, axis=1, reverse=True)
    reached, passed = (jax.vmap(partial(jnp.searchsorted, side=s)) for s in ("left", "right"))
    first, whole = reached(until, low), reached(onwards, high)
    rest, last = passed(until, low), passed(onwards, high)
    start = jnp.arange(low.shape[1]) * own.block + offset
    end = start + own.block - 1
    if window.left is not None:
        first = jnp.maximum(first, (start - window.left) // block)
        whole = jnp.maximum(whole, -((window.left - end) // block))
    if window.right is not None:
        last = jnp.minimum(last, (end + window.right) // block + 1)
        rest = jnp.minimum(rest, (start + window.right + 1) // block)
    first = jnp.clip(first, 0, count)
    last = jnp.maximum(first, last)
    whole = jnp.clip(whole, first, last)
    # A last block that is not full holds places that no token sees.
    rest = jnp.clip(jnp.minimum(rest, other.run.shape[1] // block), whole, last)
    return jnp.stack([first, whole, rest, last], axis=-1).astype(jnp.int32)
