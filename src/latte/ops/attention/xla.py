"""Attention in blocks of queries, as plain XLA: memory linear in the length.

Queries are read block by block. With a finite window a block of C ≥ W tokens reads its own keys and
those of the neighbouring blocks that its window reaches; without one it reads all keys. A block's
weights are computed again in the backward pass instead of being stored.

Letters: n blocks · B batch · G key-value heads · R query heads that share one · C block length.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from latte.ops.attention.scores import Score, Window
from latte.ops.chunk import products, visible

_HIDDEN = -2
"""Run number of keys that fill up a block: no token has it."""


def block_length(queries: int, window: Window) -> int:
    """Queries of a block: no fewer than the window reaches, so that neighbours are enough."""
    reach = max(window.left or 0, window.right or 0) + 1
    return min(max(reach, 32), queries)


def _block(
    q: Float[Array, "B G R C K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S D"],
    mask: Bool[Array, "B 1 C S"],
    score: Score,
) -> Float[Array, "B G R C D"]:
    batch, groups, share, length, size = q.shape
    einsum = products(v.dtype)
    rows = q.reshape(batch, groups, share * length, size)
    logits = score(einsum("bgtk,bgsk->bgts", rows, k)).reshape(batch, groups, share, length, -1)
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], logits, -jnp.inf), axis=-1)
    weights = weights.reshape(batch, groups, share * length, -1)
    y = einsum("bgts,bgsd->bgtd", weights, v).astype(v.dtype)
    return y.reshape(batch, groups, share, length, -1)


def _blocks(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    """Cuts an axis into blocks, which become the leading axis; the last one is filled up."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pads, constant_values=fill)
    shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _scan(read: Callable[[tuple], Array], items: tuple) -> Array:
    """Reads block after block, and computes a block's weights again in the backward pass."""
    y = jax.lax.map(jax.checkpoint(read), items)
    y = jnp.moveaxis(y, 0, 3)
    return y.reshape(*y.shape[:3], -1, y.shape[-1])


def _full(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, window: Window, score: Score
) -> Array:
    length, past = q.shape[3], k.shape[2] - q.shape[3]
    size = block_length(length, Window(None, None))
    at_k = jnp.arange(k.shape[2])

    def read(item: tuple) -> Array:
        q, run, start = item
        at_q = start + past + jnp.arange(size)
        mask = visible(run, run_k) & window.holds(at_q[:, None], at_k)
        # Filling queries see nothing; they read the first key so that their softmax is finite.
        mask |= (run[:, :, None] == _HIDDEN)[:, None] & (at_k == 0)
        return _block(q, k, v, mask, score)

    blocks = _blocks(q, 3, size), _blocks(run_q, 1, size, _HIDDEN)
    starts = jnp.arange(blocks[0].shape[0]) * size
    return _scan(read, (*blocks, starts))


def _windowed(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, window: Window, score: Score
) -> Array:
    length, past = q.shape[3], k.shape[2] - q.shape[3]
    size = block_length(length, window)
    before = size if window.left else 0
    after = size if window.right else 0

    def around(x: Array, axis: int, fill: int = 0) -> Array:
        """Of each block of queries, the blocks of keys that its window reaches."""
        x = jax.lax.slice_in_dim(x, max(past - before, 0), None, axis=axis)
        pads = [(0, 0)] * x.ndim
        pads[axis] = (max(before - past, 0), -length % size + after)
        whole = _blocks(jnp.pad(x, pads, constant_values=fill), axis, size)
        count = -(-length // size)
        parts = [whole[i : i + count] for i in range(before // size + 1 + after // size)]
        return jnp.concatenate(parts, axis=axis + 1)

    at_q = before + jnp.arange(size)
    at_k = jnp.arange(before + size + after)
    near = window.holds(at_q[:, None], at_k)

    def read(item: tuple) -> Array:
        q, k, v, run_q, run_k = item
        return _block(q, k, v, visible(run_q, run_k) & near, score)

    # Filling queries share the run of filling keys, themselves among them.
    runs = _blocks(run_q, 1, size, _HIDDEN), around(run_k, 1, _HIDDEN)
    return _scan(read, (_blocks(q, 3, size), around(k, 2), around(v, 2), *runs))


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    run_q: Int[Array, "B T"],
    run_k: Int[Array, "B S"],
    window: Window,
    score: Score,
) -> Float[Array, "B T H D"]:
    """`latte.ops.attention.attention` in blocks; the last T of the S keys are the queries' own."""
    unlimited = window.left is None or window.right is None
    reach = max(window.left or 0, window.right or 0)
    batch, length, heads, size = q.shape
    form = _full if unlimited or reach >= length else _windowed
    k, v = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    q = jnp.moveaxis(q, 1, 2).reshape(batch, k.shape[1], -1, length, size)
    y = form(q, k, v, run_q, run_k, window, score)[..., :length, :]
    return jnp.moveaxis(y.reshape(batch, heads, length, -1), 1, 2)
