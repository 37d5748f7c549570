"""What the GPU kernels of Latte share: tiles, access to blocks, and the algebra of one chunk.

The algebra is that of `xla.py`, for one head, on blocks that live in registers. Blocks are padded
to powers of two, as Triton wants: past the end of the sequence key logits are −∞, so that they
weigh nothing, and latents that are not there have key logits 0 and p = 0: nothing divides by 0.

Between chunks a state is (m, total, s) with total = exp(l), the sum itself, and the run number of
its document. Letters: C chunk length · N latents · D values, both padded.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, DTypeLike, Float, Int

_SMALLEST_SUM = 1e-26
"""Below this the terms that make up a normaliser start to underflow in float32."""

Ref = Any
"""A reference to a block of an array, inside a kernel; Pallas gives it no public type."""

_LOG2_E = math.log2(math.e)

_LEAST = 16
"""The least dimension of a matrix product in Triton."""


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut their work; a speed, never a result."""

    chunk: int = 64
    """Tokens of a chunk."""
    group: int | None = None
    """Chunks that one program of the forward pass walks; None: by shape."""
    state_warps: int = 4
    """Four warps for each 64 tokens: Triton gives rows to warps where one product feeds another,
    and more of them would repeat each other's work."""
    output_warps: int = 4
    query_warps: int = 4
    key_warps: int = 4
    stages: int = 3
    """Depth of the software pipeline of loops over chunks."""
    chain_latents: int = 16
    chain_values: int = 32
    """The part of a state that one program chains."""
    chain_ahead: int = 8
    """States of a chain that are loaded before the first is used, to hide the memory's latency."""


class Shape(NamedTuple):
    """The sizes of one call; `chunk` divides what is padded, `share` heads read one head of v."""

    batch: int
    length: int
    heads: int
    latents: int
    size: int
    chunk: int
    share: int = 1

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.length, self.chunk)

    @property
    def wide_latents(self) -> int:
        return max(_LEAST, pl.next_power_of_2(self.latents))

    @property
    def wide_size(self) -> int:
        return max(_LEAST, pl.next_power_of_2(self.size))

    def grid(self, group: int) -> tuple[int, int, int]:
        """Programs of neighbouring heads, whose rows are neighbours in memory, run together."""
        return self.heads, pl.cdiv(self.chunks, group), self.batch

    def rows(self, width: int, tokens: int) -> pl.BlockSpec:
        """`tokens` of one head of [B, T, H, ·], for the grid of `grid`."""
        return pl.BlockSpec((None, tokens, None, width), lambda h, j, b: (b, j, h, 0))

    def latent_rows(self, tokens: int) -> pl.BlockSpec:
        return self.rows(self.wide_latents, tokens)

    def value_rows(self, tokens: int) -> pl.BlockSpec:
        return self.rows(self.wide_size, tokens)

    def shared_rows(self, tokens: int) -> pl.BlockSpec:
        """Of v, which may have fewer heads."""
        block = (None, tokens, None, self.wide_size)
        return pl.BlockSpec(block, lambda h, j, b: (b, j, jax.lax.div(h, self.share), 0))

    def runs(self, tokens: int) -> pl.BlockSpec:
        """All run numbers of one row, up to a whole number of blocks of `tokens`."""
        padded = pl.cdiv(self.length, tokens) * tokens
        return pl.BlockSpec((None, padded), lambda h, j, b: (b, 0))

    def sums(self, group: int) -> pl.BlockSpec:
        """`group` vectors of one head of [B, H, n, N]."""
        return pl.BlockSpec((None, None, group, self.wide_latents), lambda h, j, b: (b, h, j, 0))

    def all_sums(self, count: int) -> pl.BlockSpec:
        """All `count` vectors of one head."""
        block = (None, None, count, self.wide_latents)
        return pl.BlockSpec(block, lambda h, j, b: (b, h, 0, 0))

    def states(self, group: int) -> pl.BlockSpec:
        """`group` matrices of one head of [B, H, n, N, D]."""
        block = (None, None, group, self.wide_latents, self.wide_size)
        return pl.BlockSpec(block, lambda h, j, b: (b, h, j, 0, 0))

    def flags(self, group: int) -> pl.BlockSpec:
        """`group` numbers of one head of [B, H, n]."""
        return pl.BlockSpec((None, None, group), lambda h, j, b: (b, h, j))

    def sums_array(self, count: int) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.heads, count, self.wide_latents)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def states_array(self, count: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.heads, count, self.wide_latents, self.wide_size)
        return jax.ShapeDtypeStruct(shape, dtype)


class Documents(NamedTuple):
    """Run numbers of a chunk's tokens, and of the first and the last of them: they rise."""

    each: Int[Array, " C"]
    first: Int[Array, ""]
    last: Int[Array, ""]


class Chunk(NamedTuple):
    """A chunk of one head; p is the softmax of q, k is −∞ past the end of the sequence."""

    p: Float[Array, "C N"]
    k: Float[Array, "C N"]
    v: Float[Array, "C D"]
    run: Documents


class Edge(NamedTuple):
    """The normaliser before a chunk, and the run number of the document that it belongs to."""

    m: Float[Array, " N"]
    total: Float[Array, " N"]
    run: Int[Array, ""]


class Carry(NamedTuple):
    """The state before a chunk."""

    edge: Edge
    s: Float[Array, "N D"]


class Weights(NamedTuple):
    """As in `xla.py`; e, cum and past are under `top`, the largest logit that some token sees.

    `exact`: every cum is far from 0.
    """

    e: Float[Array, "C N"]
    cum: Float[Array, "C N"]
    past: Float[Array, "C N"]
    pairs: Bool[Array, "C C"]
    top: Float[Array, " N"]
    exact: Bool[Array, ""]


def params(warps: int, stages: int) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_warps=warps, num_stages=stages)


def exp(x: Array) -> Array:
    """By powers of two, which are one instruction; its relative error is 1e-7 · (1 + |x|)."""
    return jnp.exp2(x * _LOG2_E)


def cells(size: int) -> Int[Array, " size"]:
    return jax.lax.iota(jnp.int32, size)


class Rows(NamedTuple):
    """Rows of a block: `left` of the sequence's tokens lie at or after `start`.

    left is None where the sequence fills every block, so that nothing need be masked.
    """

    start: Array | int
    left: Array | None
    shape: Shape

    def _mask(self, width: int, real: int) -> Array | None:
        mask = None
        if self.left is not None:
            mask = (cells(self.shape.chunk) < self.left)[:, None]
        if real < width:
            columns = (cells(width) < real)[None, :]
            mask = columns if mask is None else mask & columns
        return mask if mask is None else jnp.broadcast_to(mask, (self.shape.chunk, width))

    def load(self, ref: Ref, real: int, skip: int = 0) -> Float[Array, "C X"]:
        """The columns after the first `skip`, so many of them real, and zero for the others."""
        width = ref.shape[-1] - skip
        mask = self._mask(width, real)
        rows = ref.at[pl.ds(self.start, self.shape.chunk), pl.ds(skip, width)]
        return plgpu.load(rows, mask=mask, other=None if mask is None else 0.0)

    def store(self, ref: Ref, value: Float[Array, "C X"], real: int, skip: int = 0) -> None:
        width = ref.shape[-1] - skip
        rows = ref.at[pl.ds(self.start, self.shape.chunk), pl.ds(skip, width)]
        plgpu.store(rows, value.astype(ref.dtype), mask=self._mask(width, real))

    def values(self, ref: Ref) -> Float[Array, "C D"]:
        return self.load(ref, self.shape.size)

    def keys(self, ref: Ref) -> Float[Array, "C N"]:
        k = self.load(ref, self.shape.latents).astype(jnp.float32)
        if self.left is None:
            return k
        return jnp.where((cells(self.shape.chunk) < self.left)[:, None], k, -jnp.inf)

    def softmax(self, ref: Ref) -> Float[Array, "C N"]:
        q = self.load(ref, self.shape.latents).astype(jnp.float32)
        if self.shape.latents < q.shape[1]:
            q = jnp.where((cells(q.shape[1]) < self.shape.latents)[None, :], q, -jnp.inf)
        weights = exp(q - jnp.max(q, axis=1)[:, None])
        return weights * (1 / jnp.sum(weights, axis=1))[:, None]

    def runs(self, ref: Ref, first: Array) -> Documents:
        """Run numbers, `first` tokens further on; past the end of the sequence the last token's."""
        start, size = first + self.start, self.shape.chunk
        rows = ref.at[pl.ds(start, size)]
        if self.left is None:
            return Documents(plgpu.load(rows), ref[start], ref[start + (size - 1)])
        last = ref[start + jnp.minimum(size, self.left) - 1]
        run = plgpu.load(rows, mask=cells(size) < self.left, other=-1)
        return Documents(jnp.where(run < 0, last, run), ref[start], last)

    def store_values(self, ref: Ref, value: Float[Array, "C D"]) -> None:
        self.store(ref, value, self.shape.size)

    def store_latents(self, ref: Ref, value: Float[Array, "C N"]) -> None:
        self.store(ref, value, self.shape.latents)


def rows(shape: Shape, first: Array, i: Array | int, group: int) -> Rows:
    """Chunk i of a group of chunks that begins at token `first`."""
    start = i * shape.chunk
    whole = shape.length % (group * shape.chunk) == 0
    return Rows(start, None if whole else shape.length - first - start, shape)


def chunks_here(shape: Shape, first: Array, group: int) -> Array | int:
    """How many chunks there are of the group that begins at token `first`."""
    if shape.length % (group * shape.chunk) == 0:
        return group
    left = shape.length - first
    return jnp.minimum(group, jax.lax.div(left + (shape.chunk - 1), shape.chunk))


def run_before(ref: Ref, start: Array) -> Int[Array, ""]:
    """The run number of the state that comes to token `start`: that of the token before it."""
    return jnp.where(start == 0, 0, ref[jnp.maximum(start - 1, 0)])


def product(
    a: Array, b: Array, dtype: DTypeLike, *, over: tuple[int, int] = (1, 0)
) -> Float[Array, "X Y"]:
    """Matrix product over axis over[0] of a and over[1] of b, as `chunk.products` rounds it."""
    precision = None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        dimensions,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def see(run: Documents) -> Bool[Array, "C C"]:
    """Which token (along the first axis) reads which."""
    at = cells(run.each.shape[0])
    return (run.each[:, None] == run.each[None, :]) & (at[:, None] >= at[None, :])


def largest(k: Float[Array, "C N"], run: Documents, edge: Edge) -> Float[Array, " N"]:
    """The largest logit of a chunk, and of the state if some token sees it."""
    m = jnp.where(run.first == edge.run, edge.m, -jnp.inf)
    return jnp.maximum(m, jnp.max(k, axis=0))


def powers(
    k: Float[Array, "C N"], top: Float[Array, " N"], dtype: DTypeLike
) -> Float[Array, "C N"]:
    """e, rounded to the type of products, so that weights over their sum still add up to 1."""
    return exp(k - top[None, :]).astype(dtype)


def weigh(
    k: Float[Array, "C N"],
    run: Documents,
    edge: Edge,
    top: Float[Array, " N"],
    dtype: DTypeLike,
) -> Weights:
    """The weights of a chunk's tokens and of the carried state, under `largest`."""
    e = powers(k, top, dtype)
    m = jnp.where(run.first == edge.run, edge.m, -jnp.inf)
    seen = (run.each == edge.run)[:, None]
    past = jnp.where(seen, (exp(m - top) * edge.total)[None, :], 0.0)
    pairs = see(run)
    cum = product(jnp.where(pairs, 1.0, 0.0), e, dtype) + past
    return Weights(e, cum, past, pairs, top, jnp.min(cum) > _SMALLEST_SUM)


def reciprocal(x: Array) -> Array:
    """1 / x of positive numbers: a GPU divides by a dozen instructions, and roots by one."""
    root = jax.lax.rsqrt(x)
    return root * root


def update(k: Float[Array, "C N"], v: Float[Array, "C D"], run: Documents, carry: Carry) -> Carry:
    """The state after a chunk; always exact, because it keeps a maximum of its own."""
    edge = carry.edge
    m = jnp.where(edge.run == run.last, edge.m, -jnp.inf)
    k = jnp.where((run.each == run.last)[:, None], k, -jnp.inf)
    top = jnp.maximum(m, jnp.max(k, axis=0))
    old, new = exp(m - top) * edge.total, exp(k - top[None, :])
    total = old + jnp.sum(new, axis=0)
    share = 1 / total
    s = (old * share)[:, None] * carry.s
    s = s + product(new * share[None, :], v, v.dtype, over=(0, 0))
    return Carry(Edge(top, total, run.last), s)


def kept(edge: Edge, after: Edge) -> Float[Array, " N"]:
    """The share of the state before a chunk in that after it."""
    m = jnp.where(edge.run == after.run, edge.m, -jnp.inf)
    return exp(m - after.m) * edge.total / after.total


def added(k: Float[Array, "C N"], run: Documents, after: Edge) -> Float[Array, "C N"]:
    """The shares of a chunk's tokens in the state after it."""
    k = jnp.where((run.each == run.last)[:, None], k, -jnp.inf)
    return exp(k - after.m[None, :]) * (1 / after.total)[None, :]


class Token(NamedTuple):
    """One token's own view of a chunk, under its own maximum: exact whatever the logits."""

    p: Float[Array, " N"]
    e: Float[Array, "C N"]
    past: Float[Array, " N"]
    total: Float[Array, " N"]
    here: Bool[Array, " C"]


def token(t: Array, chunk: Chunk, edge: Edge) -> Token:
    """What token t of a chunk reads: earlier tokens with e / total and the state with past / total.

    A row is taken out of a block by a masked sum, for Triton cannot slice one.
    """
    each = chunk.run.each
    here = cells(each.shape[0]) == t
    run = jnp.max(jnp.where(here, each, -1))
    seen = (cells(each.shape[0]) <= t) & (each == run)
    k = jnp.where(seen[:, None], chunk.k, -jnp.inf)
    m = jnp.where(edge.run == run, edge.m, -jnp.inf)
    top = jnp.maximum(m, jnp.max(k, axis=0))
    e = exp(k - top[None, :])
    past = exp(m - top) * edge.total
    p = row(chunk.p, here)
    return Token(p, e, past, past + jnp.sum(e, axis=0), here)


def row(block: Float[Array, "C X"], here: Bool[Array, " C"]) -> Float[Array, " X"]:
    return jnp.sum(jnp.where(here[:, None], block.astype(jnp.float32), 0.0), axis=0)
