"""Latte within one chunk, as Mosaic kernels compute it: shapes, masks, softmax, state update.

Kernels read the flat arrays that projections leave. A group is as many heads as fill 128 lanes with
latents; what is of one head is masked, not sliced, because lanes are dear to move. Letters: C chunk
length · L lanes of a group, heads times latents · N latents and D values of a head.

The carried state is (m, z, s): m the largest logit seen, z = Σ exp(k − m) and s = Σ exp(k − m) v,
not divided by z, so that the chunks' chain of states has no division in it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, DTypeLike, Float, Int

# Where JAX 0.11 has it, and where 0.10 does.
_reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal

SMALLEST_SUM = 1e-26
"""Below this the terms that make up a normaliser start to underflow in float32."""

NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))
"""Contracted axes of products: a b, a bᵀ and aᵀ b."""


@dataclass(frozen=True)
class Layout:
    """Sizes of one call; every block of every kernel follows from them.

    group: heads that are computed side by side in the same lanes.
    block: heads of one grid step, a multiple of `group`.
    dtype: what products are rounded to; their sums are float32.
    """

    batch: int
    length: int
    heads: int
    latents: int
    size: int
    chunk: int
    group: int
    block: int
    dtype: DTypeLike

    @property
    def chunks(self) -> int:
        return self.length // self.chunk

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.heads // self.block, self.chunks

    @property
    def lanes(self) -> int:
        return self.group * self.latents

    def groups(self) -> list["Group"]:
        return [Group(self, index) for index in range(self.block // self.group)]


@dataclass(frozen=True)
class Group:
    """A block's group of heads, by its number, and where it is in the block's arrays."""

    layout: Layout
    index: int | Array

    @property
    def latents(self) -> Any:
        """Its latents, in lanes of q and k and in rows of the state."""
        return _part(self.index, self.layout.lanes)

    @property
    def values(self) -> Any:
        """Its heads' values, in lanes of v and y."""
        return _part(self.index, self.layout.group * self.layout.size)

    def rows(self, head: int) -> slice:
        """A head's latents among those of its group."""
        return slice(head * self.layout.latents, (head + 1) * self.layout.latents)

    def columns(self, head: int) -> slice:
        """A head's values among those of its group."""
        return slice(head * self.layout.size, (head + 1) * self.layout.size)

    @property
    def heads(self) -> range:
        return range(self.layout.group)


def _part(index: int | Array, size: int) -> Any:
    if isinstance(index, int):
        return slice(index * size, (index + 1) * size)
    return pl.ds(pl.multiple_of(index * size, size), size)


def dot(a: Array, b: Array, axes: tuple, dtype: DTypeLike = jnp.float32) -> Array:
    """A matrix product of operands rounded to `dtype`, summed in float32."""
    precision = None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (axes, ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _halves(x: Float[Array, "R L"]) -> tuple[Array, Array]:
    """x as the sum of a bfloat16 and what is left: 16 bits of it in two short products."""
    high = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = jax.lax.bitcast_convert_type(high, jnp.float32)
    return high, x - high


def sums(which: Bool[Array, "R C"], x: Float[Array, "C L"], dtype: DTypeLike) -> Array:
    """The sum of the rows of x that each row of `which` names; to 16 bits in bfloat16."""
    ones = jnp.where(which, 1.0, 0.0)
    if dtype != jnp.bfloat16:
        return dot(ones, x, NN)
    high, low = _halves(x)
    return dot(ones, high, NN, dtype) + dot(ones, low, NN, dtype)


def sums_across(x: Float[Array, "R C"], which: Float[Array, "C L"], dtype: DTypeLike) -> Array:
    """The sum of each row of x over what a column of ones and zeros names; to 16 bits in bfloat16.

    Sums of lanes are cheaper on the matrix units than between lanes.
    """
    if dtype != jnp.bfloat16:
        return dot(x, which, NN)
    high, low = _halves(x)
    return dot(high, which, NN, dtype) + dot(low, which, NN, dtype)


def _heads_along(layout: Layout, shape: tuple[int, int], axis: int) -> Int[Array, "R L"]:
    """The head of each latent along an axis; a division of vectors would cost more."""
    place = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    starts = range(layout.latents, layout.lanes, layout.latents)
    return sum((jnp.where(place >= start, 1, 0) for start in starts), jnp.zeros(shape, jnp.int32))


def head_of_lane(layout: Layout, rows: int) -> Int[Array, "R L"]:
    return _heads_along(layout, (rows, layout.lanes), 1)


def of_heads(layout: Layout, parts: list[Array]) -> Float[Array, "R L"]:
    """The lanes of each head from that head's part [R, L]."""
    out = parts[0]
    if len(parts) > 1:
        head = head_of_lane(layout, out.shape[0])
        for h in range(1, len(parts)):
            out = jnp.where(head == h, parts[h], out)
    return out


def only_head(
    layout: Layout, x: Float[Array, "R L"], h: int, other: float = 0.0
) -> Float[Array, "R L"]:
    """x with `other` in the lanes of the other heads."""
    if layout.group == 1:
        return x
    return jnp.where(head_of_lane(layout, x.shape[0]) == h, x, other)


def same_head(layout: Layout) -> Float[Array, "L L"]:
    """Ones between latents of one head: a product with it sums each head and spreads the sum."""
    row, lane = (_heads_along(layout, (layout.lanes, layout.lanes), axis) for axis in (0, 1))
    return jnp.where(row == lane, 1.0, 0.0)


def softmax(layout: Layout, q: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """Over the latents of each head."""
    top = [
        jnp.max(only_head(layout, q, h, -jnp.inf), axis=1, keepdims=True)
        for h in range(layout.group)
    ]
    weights = jnp.exp(q - of_heads(layout, [jnp.broadcast_to(t, q.shape) for t in top]))
    if layout.group == 1:
        return weights * inverse(jnp.sum(weights, axis=1, keepdims=True))
    # Sums over some of the lanes are cheaper on the matrix units than between lanes.
    return weights * inverse(head_sums(layout, weights))


def head_sums(layout: Layout, x: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """The sum over each head's latents, in each of that head's lanes."""
    return sums_across(x, same_head(layout), layout.dtype)


def inverse(x: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """1 / x where both are normal numbers: without a division's care for what is not."""
    return _reciprocal(x, full_range=False)


def column(row: Float[Array, "1 L"]) -> Float[Array, "L 1"]:
    """A row of lanes as a column of sublanes."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


class Masks(NamedTuple):
    """Who sees whom in a chunk.

    pairs: token t (rows) may read token s (columns). later: the same, s in rows.
    seen: token t is of the carried state's document.
    kept: token t is of the last token's document, whose state goes on.
    begins, goes_on: the first, the last token is of the carried state's document.
    """

    pairs: Bool[Array, "C C"]
    later: Bool[Array, "C C"]
    seen: Bool[Array, "C L"]
    kept: Bool[Array, "C L"]
    begins: Bool[Array, "1 L"]
    goes_on: Bool[Array, "1 L"]


def masks(layout: Layout, runs: Any) -> Masks:
    """From a block [2, C] of run numbers: each token's, and that of the token before it."""
    c, lanes = layout.chunk, layout.lanes
    run = runs[0:1, :]

    def down(width: int) -> Array:
        return jnp.broadcast_to(run, (width, c)).T

    across, by_lane = down(c), down(lanes)
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
    first, last, carried = run[:, :1], run[:, c - 1 :], runs[1:2, :1]
    return Masks(
        pairs=(across == run) & (s <= t),
        later=(across == run) & (s >= t),
        seen=by_lane == carried,
        kept=by_lane == last,
        begins=jnp.broadcast_to(first, (1, lanes)) == carried,
        goes_on=jnp.broadcast_to(last, (1, lanes)) == carried,
    )


class Carry(NamedTuple):
    """The carried state of a group."""

    m: Float[Array, "1 L"]
    z: Float[Array, "1 L"]
    s: Float[Array, "L D"]


class Weights(NamedTuple):
    """What a chunk's outputs are made of, under the largest logit r in it and in the state.

    e = exp(k − r); cum the normaliser of each token; f = exp(m − r) weighs the carried state, 0
    where the chunk begins in another document. exact: no normaliser is near underflow.
    """

    e: Float[Array, "C L"]
    cum: Float[Array, "C L"]
    f: Float[Array, "1 L"]
    exact: Bool[Array, "1 1"]


def weigh(layout: Layout, k: Float[Array, "C L"], carry: Carry, mask: Masks) -> Weights:
    m = jnp.where(mask.begins, carry.m, -jnp.inf)
    r = jnp.maximum(m, jnp.max(k, axis=0, keepdims=True))
    e, f = jnp.exp(k - r), jnp.exp(m - r)
    within = sums(mask.pairs, e, layout.dtype)
    cum = within + jnp.where(mask.seen, f * carry.z, 0)
    smallest = jnp.min(jnp.min(cum, axis=0, keepdims=True), axis=1, keepdims=True)
    return Weights(e, cum, f, smallest > SMALLEST_SUM)


class Update(NamedTuple):
    """A state's update: its new maximum, and under it the weights of tokens and of the old."""

    m: Float[Array, "1 L"]
    new: Float[Array, "C L"]
    old: Float[Array, "1 L"]


def update(k: Float[Array, "C L"], m: Float[Array, "1 L"], mask: Masks) -> Update:
    """With a maximum of the last document's own, so it is exact whatever the logits."""
    before = jnp.where(mask.goes_on, m, -jnp.inf)
    kept = jnp.where(mask.kept, k, -jnp.inf)
    after = jnp.maximum(before, jnp.max(kept, axis=0, keepdims=True))
    return Update(after, jnp.exp(kept - after), jnp.exp(before - after))


def per_head_rows(
    group: Group, x: Float[Array, "C L"], others: Float[Array, "C V"]
) -> Float[Array, "L D"]:
    """Σ_t x_t other_tᵀ: each head's latents with that head's values."""
    dtype = group.layout.dtype
    across = x.astype(dtype).T
    parts = [
        dot(across[group.rows(h)], others[:, group.columns(h)], NN, dtype) for h in group.heads
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def advance(carry: Carry, new: Update, group: Group, v: Float[Array, "C V"]) -> Carry:
    s = column(new.old) * carry.s + per_head_rows(group, new.new, v)
    z = new.old * carry.z + jnp.sum(new.new, axis=0, keepdims=True)
    return Carry(new.m, z, s)
