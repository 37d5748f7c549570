"""Latte in chunks, as plain XLA: matrix products within a chunk, one state between chunks.

Within a chunk, with r the largest logit in it and in the carried state, per latent:

    e_s   = exp(k_s − r)                       ≤ 1
    cum_t = Σ_{s≤t} e_s + exp(m + l − r)       a product with a triangle of ones; no logarithm
    u_t   = p_t / cum_t
    A_ts  = Σ_n u_tn e_sn                      for s ≤ t in one document
    y_t   = Σ_s A_ts v_s + (u_t exp(m + l − r))ᵀ S

This is exact while every cum is far from underflow. A chunk in which it is not (logits that jump by
more than 59) takes the token recurrence for its outputs instead; the state's update keeps a maximum
of its own and is always exact. The backward pass recomputes the chunks' states and then each chunk,
so nothing of size T×C or T×N×D is stored.

Letters: n chunks · B batch · H heads · C chunk length · N latents · D values; t reads, s is read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from latte.ops.chunk import accumulator, join, products, split, split_runs, visible
from latte.ops.latte.state import LatteState, scan_tokens, step
from latte.ops.segments import Runs

_SMALLEST_SUM = 1e-26
"""Below this the terms that make up a normaliser start to underflow in float32."""


class _Chunk(NamedTuple):
    p: Float[Array, "B H C N"]
    k: Float[Array, "B H C N"]
    v: Float[Array, "B H C D"]
    run: Int[Array, "B C"]


class _Carry(NamedTuple):
    """The state between chunks, and the number of the document that it belongs to."""

    m: Float[Array, "B H N"]
    l: Float[Array, "B H N"]
    s: Float[Array, "B H N D"]
    run: Int[Array, " B"]


class _Weights(NamedTuple):
    """What a chunk's outputs are made of; `past` weighs the carried state, 0 where unseen."""

    e: Float[Array, "B H C N"]
    cum: Float[Array, "B H C N"]
    past: Float[Array, "B H C N"]
    pairs: Bool[Array, "B 1 C C"]
    exact: Bool[Array, ""]


def chunk_length(length: int) -> int:
    """Tokens of a chunk: long enough to fill matrix units, no longer than the sequence."""
    return min(64, length)


def _weights(chunk: _Chunk, carry: _Carry) -> _Weights:
    seen = (chunk.run == carry.run[:, None])[:, None, :, None]
    m = jnp.where(seen[:, :, 0], carry.m, -jnp.inf)
    r = jnp.maximum(m, chunk.k.max(axis=2))
    e = jnp.exp(chunk.k - r[:, :, None])
    past = jnp.where(seen, jnp.exp(m - r + carry.l)[:, :, None], 0)
    pairs = visible(chunk.run, chunk.run) & jnp.tri(chunk.run.shape[1], dtype=bool)
    cum = products(e.dtype)("bts,bhsn->bhtn", pairs[:, 0], e) + past
    return _Weights(e, cum, past, pairs, jnp.all(cum > _SMALLEST_SUM))


def _recurrence(chunk: _Chunk, carry: _Carry) -> Float[Array, "B H C D"]:
    """A chunk's outputs token by token: exact whatever the logits, and slow."""
    run = chunk.run.T
    first = run != jnp.concatenate([carry.run[None], run[:-1]])
    tokens = [jnp.moveaxis(x.astype(carry.s.dtype), 2, 0) for x in (chunk.p, chunk.k, chunk.v)]
    state = LatteState(carry.m, carry.l, carry.s, carry.run)
    return jnp.moveaxis(scan_tokens(state, (*tokens, first))[0], 0, 2)


def _outputs(chunk: _Chunk, carry: _Carry) -> Float[Array, "B H C D"]:
    weights = _weights(chunk, carry)

    def in_products(chunk: _Chunk, carry: _Carry) -> Array:
        einsum = products(chunk.v.dtype)
        u = chunk.p / weights.cum
        a = jnp.where(weights.pairs, einsum("bhtn,bhsn->bhts", u, weights.e), 0)
        y = einsum("bhts,bhsd->bhtd", a, chunk.v)
        return y + einsum("bhtn,bhnd->bhtd", u * weights.past, carry.s)

    return jax.lax.cond(weights.exact, in_products, _recurrence, chunk, carry)


class _Gradients(NamedTuple):
    p: Float[Array, "B H C N"]
    k: Float[Array, "B H C N"]
    v: Float[Array, "B H C D"]
    l: Float[Array, "B H N"]
    s: Float[Array, "B H N D"]


def _outputs_transpose(chunk: _Chunk, carry: _Carry, dy: Float[Array, "B H C D"]) -> _Gradients:
    """What the outputs' gradient dy says of the chunk and of the carried state."""
    weights = _weights(chunk, carry)

    def in_products(chunk: _Chunk, carry: _Carry, dy: Array) -> _Gradients:
        einsum = products(chunk.v.dtype)
        e, cum, past, pairs, _ = weights
        u = chunk.p / cum
        a = jnp.where(pairs, einsum("bhtn,bhsn->bhts", u, e), 0)
        da = jnp.where(pairs, einsum("bhtd,bhsd->bhts", dy, chunk.v), 0)
        read = einsum("bhtd,bhnd->bhtn", dy, carry.s)
        dp = (einsum("bhts,bhsn->bhtn", da, e) + past * read) / cum
        # A softmax's gradient: each weight times (its own term − the mean term, which is dp).
        mean = einsum("bts,bhtn->bhsn", pairs[:, 0], u * dp)
        through = u * past
        return _Gradients(
            p=dp,
            k=e * (einsum("bhts,bhtn->bhsn", da, u) - mean),
            v=einsum("bhts,bhtd->bhsd", a, dy),
            l=jnp.sum(through * (read - dp), axis=2),
            s=einsum("bhtn,bhtd->bhnd", through, dy),
        )

    def in_recurrence(chunk: _Chunk, carry: _Carry, dy: Array) -> _Gradients:
        def outputs(p: Array, k: Array, v: Array, l: Array, s: Array) -> Array:
            return _recurrence(_Chunk(p, k, v, chunk.run), _Carry(carry.m, l, s, carry.run))

        wide = [x.astype(carry.s.dtype) for x in (chunk.p, chunk.k, chunk.v)]
        _, transpose = jax.vjp(outputs, *wide, carry.l, carry.s)
        return _Gradients(*transpose(dy))

    return jax.lax.cond(weights.exact, in_products, in_recurrence, chunk, carry, dy)


def _update(chunk: _Chunk, carry: _Carry) -> tuple[_Carry, Array, Array]:
    """The state after a chunk, and in it the weights of the old state and of the tokens."""
    kept = (chunk.run == chunk.run[:, -1:])[:, None, :, None]
    goes_on = (carry.run == chunk.run[:, -1])[:, None, None]
    before = jnp.where(goes_on, carry.m, -jnp.inf)
    k = jnp.where(kept, chunk.k, -jnp.inf)
    m = jnp.maximum(before, k.max(axis=2))
    old = jnp.exp(before - m + carry.l)
    new = jnp.exp(k - m[:, :, None])
    total = old + new.sum(axis=2)
    old, new = old / total, new / total[:, :, None]
    s = old[..., None] * carry.s + products(chunk.v.dtype)("bhsn,bhsd->bhnd", new, chunk.v)
    return _Carry(m, jnp.log(total), s, chunk.run[:, -1]), old, new


def _update_transpose(chunk: _Chunk, carry: _Carry, dl: Array, ds: Array) -> _Gradients:
    """What the gradient of the next state says of the chunk and of the carried state."""
    einsum = products(chunk.v.dtype)
    after, old, new = _update(chunk, carry)
    mean = dl - jnp.sum(after.s * ds, axis=3)
    return _Gradients(
        p=jnp.zeros_like(chunk.p),
        k=new * (einsum("bhsd,bhnd->bhsn", chunk.v, ds) + mean[:, :, None]),
        v=einsum("bhsn,bhnd->bhsd", new, ds),
        l=old * (jnp.sum(carry.s * ds, axis=3) + mean),
        s=old[..., None] * ds,
    )


def _chunks(p: Array, k: Array, v: Array, run: Array) -> _Chunk:
    size = chunk_length(k.shape[1])
    wide = accumulator(v.dtype)
    return _Chunk(
        split(p, size),
        split(k.astype(wide), size, fill=-jnp.inf),
        split(v, size),
        split_runs(run, size),
    )


@jax.custom_vjp
def _mix(
    p: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    run: Int[Array, "B T"],
    carry: _Carry,
) -> tuple[Float[Array, "B T H D"], _Carry]:
    def body(carry: _Carry, chunk: _Chunk) -> tuple[_Carry, Array]:
        return _update(chunk, carry)[0], _outputs(chunk, carry).astype(v.dtype)

    carry, y = jax.lax.scan(body, carry, _chunks(p, k, v, run))
    return join(y, k.shape[1]), carry


def _mix_forward(p: Array, k: Array, v: Array, run: Array, carry: _Carry):
    return _mix(p, k, v, run, carry), (p, k, v, run, carry)


def _mix_backward(saved: tuple, cotangent: tuple) -> tuple:
    p, k, v, run, carry = saved
    dy, after = cotangent
    chunks = _chunks(p, k, v, run)
    _, carries = jax.lax.scan(lambda carry, c: (_update(c, carry)[0], carry), carry, chunks)

    def body(later: tuple[Array, Array], item: tuple) -> tuple[tuple[Array, Array], tuple]:
        chunk, carry, dy = item
        ahead = _update_transpose(chunk, carry, *later)
        here = _outputs_transpose(chunk, carry, dy)
        total = jax.tree.map(jnp.add, here, ahead)
        return (total.l, total.s), (total.p, total.k, total.v)

    dy = split(dy.astype(carry.s.dtype), chunks.p.shape[3])
    (dl, ds), grads = jax.lax.scan(body, (after.l, after.s), (chunks, carries, dy), reverse=True)
    inputs = zip(grads, (p, k, v), strict=True)
    dp, dk, dv = (join(grad, k.shape[1]).astype(x.dtype) for grad, x in inputs)
    return dp, dk, dv, None, _Carry(jnp.zeros_like(dl), dl, ds, None)  # pyright: ignore


_mix.defvjp(_mix_forward, _mix_backward)


def mix(
    p: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    runs: Runs,
    state: LatteState,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    """`latte.ops.latte.mix` in chunks."""
    if k.shape[1] == 1:
        return _one(p, k, v, runs, state)
    carry = _Carry(state.m, state.l, state.s, jnp.zeros_like(runs.last))
    y, carry = _mix(p, k, v, runs.run, carry)
    return y, LatteState(jax.lax.stop_gradient(carry.m), carry.l, carry.s, runs.last)


def _one(p: Array, k: Array, v: Array, runs: Runs, state: LatteState) -> tuple[Array, LatteState]:
    """One token needs no chunk: generation runs the recurrence itself."""
    wide = state.s.dtype
    state, y = step(state, p[:, 0], k[:, 0].astype(wide), v[:, 0].astype(wide), runs.first[:, 0])
    return y[:, None].astype(v.dtype), state._replace(segment=runs.last)
