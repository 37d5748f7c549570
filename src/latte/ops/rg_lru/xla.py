"""RG-LRU in chunks, compiled by XLA on anything.

The recurrence h_t = a_t h_{t−1} + b_t runs at two levels, in some 3√T steps, each of them wide. All
chunks at once are folded into one step each (the product of a, and h from zero); a short chain over
those steps gives the state in which each chunk begins; and all chunks at once run from it. The
second run reads a and b again, but nothing is written except h, which measures faster than keeping
what the first run saw.

The gradient G_t = ∂L/∂h_t obeys the same recurrence run the other way,
G_t = ∂L/∂y_t + a_{t+1} G_{t+1}, and all others are elementwise in G, the inputs and the output h.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from latte.ops.rg_lru.gates import lam_slope, log_decay, multiplier_of, multiplier_slope


def chunk_length(length: int) -> int:
    """The power of two at or above √T, at least 16: as many steps within chunks as between them."""
    return max(16, 1 << ((length - 1).bit_length() + 1) // 2)


def _recurrence(
    x: Float[Array, "B T W"],
    r: Float[Array, "B T W"],
    i: Float[Array, "B T W"],
    lam: Float[Array, " W"],
    first: Bool[Array, "B T"],
    h: Float[Array, "B W"],
    reverse: bool = False,
) -> tuple[Float[Array, "B T W"], Float[Array, "B W"]]:
    """What the definition computes; `first` marks where documents begin."""
    log_a, m, gate = _gates(r, i, lam, first, h.dtype)
    hs = linear_recurrence(jnp.exp(log_a), m * gate * x.astype(h.dtype), h, reverse=reverse)
    return hs.astype(x.dtype), hs[:, 0 if reverse else -1]


def _forward(x, r, i, lam, first, h, reverse):
    hs, last = recurrence(x, r, i, lam, first, h, reverse)
    return (hs, last), (x, r, i, lam, first, h, hs)


def _backward(reverse, residuals, cotangents):
    x, r, i, lam, first, h, hs = residuals
    dhs, dlast = (d.astype(h.dtype) for d in cotangents)
    log_a, m, gate = _gates(r, i, lam, first, h.dtype)
    a = jnp.exp(log_a)
    x_, r_, lam_ = (z.astype(h.dtype) for z in (x, r, lam))

    following = _shift(a, jnp.ones_like(h), by=1 if reverse else -1)
    g = linear_recurrence(following, dhs, dlast, reverse=not reverse)
    before = _shift(hs.astype(h.dtype), h, by=-1 if reverse else 1)

    # log_a is −∞ at first tokens, where nothing depends on the decay.
    decays = ~first[..., None]
    log_a = jnp.where(decays, log_a, 0)
    dnu = jnp.where(decays, g * (log_a * a * before + multiplier_slope(log_a, m) * gate * x_), 0)
    dinput = g * m
    dx = dinput * gate
    dr = dnu * jax.nn.sigmoid(-r_)
    di = dx * x_ * jax.nn.sigmoid(-i.astype(h.dtype))
    dlam = dnu.sum((0, 1)) * lam_slope(lam_)
    dh = (a * g)[:, -1 if reverse else 0]
    dx, dr, di, dlam = (
        d.astype(z.dtype) for d, z in zip((dx, dr, di, dlam), (x, r, i, lam), strict=True)
    )
    return dx, dr, di, dlam, None, dh


recurrence = jax.custom_vjp(_recurrence, nondiff_argnames=("reverse",))
recurrence.defvjp(_forward, _backward)


def _gates(r, i, lam, first, dtype):
    """log a (−∞ at a document's first token), the multiplier (1 there) and σ(i)."""
    first = first[..., None]
    log_a = log_decay(r.astype(dtype), lam.astype(dtype))
    m = jnp.where(first, 1, multiplier_of(log_a))
    return jnp.where(first, -jnp.inf, log_a), m, jax.nn.sigmoid(i.astype(dtype))


def _shift(z, fill, by):
    """z moved one token later (by = 1) or earlier (by = −1), with `fill` in the empty place."""
    if by == 1:
        return jnp.concatenate([fill[:, None], z[:, :-1]], axis=1)
    return jnp.concatenate([z[:, 1:], fill[:, None]], axis=1)


def linear_recurrence(
    a: Float[Array, "B T W"],
    b: Float[Array, "B T W"],
    h: Float[Array, "B W"],
    *,
    reverse: bool = False,
) -> Float[Array, "B T W"]:
    """h_t = a_t h_{t−1} + b_t from h (h_t = a_t h_{t+1} + b_t under `reverse`), with |a| ≤ 1."""
    B, T, W = b.shape
    if T == 1:
        return a * h[:, None] + b
    C = chunk_length(T)
    n = -(-T // C)
    # Steps that change nothing fill the last chunk; the state passes them in either direction.
    pad = ((0, 0), (0, n * C - T), (0, 0))
    a = jnp.pad(a, pad, constant_values=1).reshape(B, n, C, W)
    b = jnp.pad(b, pad).reshape(B, n, C, W)
    starts = h[:, None] if n == 1 else _chunk_starts(_fold(a, b, reverse), h, reverse)
    return _run(a, b, starts, reverse).reshape(B, n * C, W)[:, :T]


def _fold(a, b, reverse):
    """Each chunk as one step [B, n, W]: the product of its a, and its last h from zero."""

    def token(k, carry):
        product, h = carry
        a_k, b_k = _token(a, k, reverse), _token(b, k, reverse)
        return a_k * product, a_k * h + b_k

    first = _token(a, 0, reverse), _token(b, 0, reverse)
    return jax.lax.fori_loop(1, a.shape[2], token, first)


def _chunk_starts(folded, h, reverse):
    """The state [B, n, W] in which each chunk begins, given each as one step."""

    def chunk(h, step):
        a, b = step
        return a * h + b, h

    steps = tuple(jnp.moveaxis(z, 1, 0) for z in folded)
    return jnp.moveaxis(jax.lax.scan(chunk, h, steps, reverse=reverse)[1], 0, 1)


def _run(a, b, starts, reverse):
    """h at every token [B, n, C, W], of all chunks at once."""
    C = a.shape[2]

    def token(k, carry):
        h, hs = carry
        h = _token(a, k, reverse) * h + _token(b, k, reverse)
        at = C - 1 - k if reverse else k
        return h, jax.lax.dynamic_update_index_in_dim(hs, h, at, 2)

    return jax.lax.fori_loop(0, C, token, (starts, jnp.zeros_like(b)))[1]


def _token(z, k, reverse):
    """The k-th token [B, n, W] of every chunk, in the order of the run."""
    at = z.shape[2] - 1 - k if reverse else k
    return jax.lax.dynamic_index_in_dim(z, at, 2, keepdims=False)
