"""Bidirectional Latte: every token reads the mixture of its whole document (equation 6).

With M and Z the largest logit of a document and Σ exp(k − M) over it, per latent, every weight
exp(k_s − M) is at most 1 and Z at least 1, so

    y_t = Σ_{s in t's document} Σ_n (p_tn / Z_n) exp(k_sn − M_n) v_s

is linear attention without decay, run forwards over s ≤ t and backwards over s > t.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from latte.ops.chunk import accumulator, join, products, split, split_runs, visible
from latte.ops.dispatch import choose
from latte.ops.latte.xla import chunk_length
from latte.ops.segments import EMPTY, number_runs


def _document_softmax(
    k: Float[Array, "B T H N"], run: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H N"]]:
    """exp(k − M), and Z, each token's document's."""
    length = k.shape[1]

    def one(k: Array, run: Array) -> tuple[Array, Array]:
        m = jax.ops.segment_max(jax.lax.stop_gradient(k), run, num_segments=length + 1)
        e = jnp.exp(k - m[run])
        return e, jax.ops.segment_sum(e, run, num_segments=length + 1)[run]

    return jax.vmap(one)(k, run)


def _scan(
    u: Float[Array, "n B H C N"],
    e: Float[Array, "n B H C N"],
    v: Float[Array, "n B H C D"],
    run: Int[Array, "n B C"],
    pairs: Bool[Array, "C C"],
    reverse: bool,
) -> Float[Array, "n B H C D"]:
    """Linear attention over the pairs of a chunk and the documents' sums from the chunks before."""
    einsum = products(v.dtype)
    edge = 0 if reverse else -1

    @jax.checkpoint
    def body(carry: tuple[Array, Array], item: tuple) -> tuple[tuple[Array, Array], Array]:
        s, carried = carry
        u, e, v, run = item
        mask = visible(run, run) & pairs
        y = einsum("bhts,bhsd->bhtd", jnp.where(mask, einsum("bhtn,bhsn->bhts", u, e), 0), v)
        seen = (run == carried[:, None])[:, None, :, None]
        y = y + einsum("bhtn,bhnd->bhtd", jnp.where(seen, u, 0), s)
        last = run[:, edge]
        s = jnp.where((last == carried)[:, None, None, None], s, 0)
        kept = (run == last[:, None])[:, None, :, None]
        return (s + einsum("bhsn,bhsd->bhnd", jnp.where(kept, e, 0), v), last), y

    _, batch, heads, _, latents = u.shape
    s = jnp.zeros((batch, heads, latents, v.shape[-1]), accumulator(v.dtype))
    empty = jnp.full((batch,), EMPTY, run.dtype)
    return jax.lax.scan(body, (s, empty), (u, e, v, run), reverse=reverse)[1]


def _xla(p: Array, k: Array, v: Array, run: Array) -> Float[Array, "B T H D"]:
    length = k.shape[1]
    size = chunk_length(length)
    e, z = _document_softmax(k.astype(accumulator(v.dtype)), run)
    items = (split(p / z, size), split(e, size), split(v, size), split_runs(run, size))
    past = jnp.tri(size, dtype=bool)
    y = _scan(*items, past, reverse=False) + _scan(*items, ~past, reverse=True)
    return join(y, length).astype(v.dtype)


def _reference(p: Array, k: Array, v: Array, run: Array) -> Float[Array, "B T H D"]:
    """Equation 6 as it stands, with every pair of tokens written out."""
    wide = accumulator(v.dtype)
    logits = jnp.broadcast_to(k.astype(wide)[:, None], (k.shape[0], k.shape[1], *k.shape[1:]))
    mask = visible(run, run)[:, 0, :, :, None, None]
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=2)
    y = jnp.einsum("bthn,btshn,bshd->bthd", p, weights, v.astype(wide), precision="highest")
    return y.astype(v.dtype)


_IMPLEMENTATIONS = {"reference": _reference, "xla": _xla}


def mix_bidirectional(
    p: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    impl: str | None = None,
) -> Float[Array, "B T H D"]:
    """`latte.ops.latte.bidirectional` with the weights of the latents given."""
    batch, length = k.shape[:2]
    run = number_runs(segment_ids, jnp.full((batch,), EMPTY, jnp.int32), length).run
    return choose("latte (bidirectional)", impl, _IMPLEMENTATIONS)(p, k, v, run)
