"""The gradients of one chunk on GPUs, in matrix products and token by token.

The equations are in `gpu_backward.py`. Products are exact where the forward pass found them so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from latte.ops.latte import gpu_block as block
from latte.ops.latte.gpu_block import Chunk, Shape


@dataclass(frozen=True)
class Inputs:
    """Chunk i of a group, read where it is needed: what is loaded early holds registers.

    refs: q, k, v, dy, run, m, total, s and top; m and total of all edges, top of all chunks.
    """

    refs: tuple
    first: Array
    i: Array | int
    rows: block.Rows

    @property
    def p(self) -> Float[Array, "C N"]:
        return self.rows.softmax(self.refs[0])

    @property
    def k(self) -> Float[Array, "C N"]:
        return self.rows.keys(self.refs[1])

    @property
    def v(self) -> Float[Array, "C D"]:
        return self.rows.values(self.refs[2])

    @property
    def dy(self) -> Float[Array, "C D"]:
        return self.rows.values(self.refs[3])

    @property
    def run(self) -> block.Documents:
        return self.rows.runs(self.refs[4], self.first)

    @property
    def s(self) -> Float[Array, "N D"]:
        return self.refs[7][self.i, :, :]

    @property
    def index(self) -> Array:
        """The chunk's number."""
        return jax.lax.div(self.first + self.rows.start, self.rows.shape.chunk)

    @property
    def edge(self) -> block.Edge:
        before = block.run_before(self.refs[4], self.first + self.rows.start)
        return block.Edge(self.refs[5][self.index, :], self.refs[6][self.index, :], before)

    @property
    def after(self) -> block.Edge:
        after = self.index + 1
        return block.Edge(self.refs[5][after, :], self.refs[6][after, :], self.run.last)

    @property
    def top(self) -> Float[Array, " N"]:
        return self.refs[8][self.index, :]


class Queries(NamedTuple):
    """What outputs say of their own p and of the state before their chunk."""

    p: Float[Array, "C N"]
    ds: Float[Array, "N D"]
    g: Float[Array, " N"]


class Keys(NamedTuple):
    """What outputs say of the tokens of their own chunk."""

    k: Float[Array, "C N"]
    v: Float[Array, "C D"]


class Reads(NamedTuple):
    """What a chunk's queries tell its keys, of the type of products: p over the sum that it is
    divided by, and that times dp."""

    u: Float[Array, "C N"]
    mean: Float[Array, "C N"]


def _of_pairs(pairs: Bool[Array, "C C"], inputs: Inputs) -> Float[Array, "C C"]:
    """v_sᵀ dy_t."""
    dtype = inputs.refs[2].dtype
    da = block.product(inputs.dy, inputs.v, dtype, over=(1, 1))
    return jnp.where(pairs, da, 0.0).astype(dtype)


def queries_in_products(inputs: Inputs, p: Float[Array, "C N"]) -> tuple[Queries, Reads]:
    dtype = inputs.refs[2].dtype
    weights = block.weigh(inputs.k, inputs.run, inputs.edge, inputs.top, dtype)
    read = weights.past * block.product(inputs.dy, inputs.s, dtype, over=(1, 1))
    near = block.product(_of_pairs(weights.pairs, inputs), weights.e, dtype)
    inverse = block.reciprocal(weights.cum)
    dp, u = (read + near) * inverse, p * inverse
    # Rounded as in the product with dy, so that s·ds − g stays a difference of the same terms.
    through = (u * weights.past).astype(dtype)
    g = jnp.sum(through.astype(jnp.float32) * dp, axis=0)
    ds = block.product(through, inputs.dy, dtype, over=(0, 0))
    return Queries(dp, ds, g), Reads(u.astype(dtype), (u * dp).astype(dtype))


def keys_in_products(inputs: Inputs, reads: Reads) -> Keys:
    dtype = inputs.refs[2].dtype
    pairs = block.see(inputs.run)
    e = block.powers(inputs.k, inputs.top, dtype)
    mean = block.product(jnp.where(pairs, 1.0, 0.0), reads.mean, dtype, over=(0, 0))
    seen = block.product(_of_pairs(pairs, inputs), reads.u, dtype, over=(0, 0))
    a = jnp.where(pairs, block.product(reads.u, e, dtype, over=(1, 1)), 0.0)
    dv = block.product(a, inputs.dy, dtype, over=(0, 0))
    return Keys(e.astype(jnp.float32) * (seen - mean), dv)


class _Read(NamedTuple):
    """One token's reading of its chunk and of the carried state."""

    token: block.Token
    u: Float[Array, " N"]
    dy: Float[Array, " D"]
    pairs: Float[Array, " C"]
    dp: Float[Array, " N"]


def _reader(inputs: Inputs) -> Callable[[Array], _Read]:
    chunk = Chunk(inputs.p, inputs.k, inputs.v, inputs.run)
    edge, s, dy = inputs.edge, inputs.s.astype(jnp.float32), inputs.dy

    def read(t: Array) -> _Read:
        token = block.token(t, chunk, edge)
        here = block.row(dy, token.here)
        pairs = jnp.sum(chunk.v.astype(jnp.float32) * here[None, :], axis=1)
        past = token.past * jnp.sum(s * here[None, :], axis=1)
        dp = (jnp.sum(token.e * pairs[:, None], axis=0) + past) / token.total
        return _Read(token, token.p / token.total, here, pairs, dp)

    return read


def _by_tokens(body: Callable, shape: Shape, *blocks: tuple[int, ...]) -> tuple:
    """The sums that body(t, sums) adds up, from zeros."""
    zeros = tuple(jnp.zeros(sizes, jnp.float32) for sizes in blocks)
    return jax.lax.fori_loop(0, shape.chunk, body, zeros)


def queries_by_tokens(inputs: Inputs, shape: Shape) -> Queries:
    reader = _reader(inputs)

    def body(t, sums):
        read = reader(t)
        through = read.u * read.token.past
        dp = jnp.where(read.token.here[:, None], read.dp[None, :], sums[0])
        return dp, sums[1] + through[:, None] * read.dy[None, :], sums[2] + through * read.dp

    n, d = shape.wide_latents, shape.wide_size
    return Queries(*_by_tokens(body, shape, (shape.chunk, n), (n, d), (n,)))


def keys_by_tokens(inputs: Inputs, shape: Shape) -> Keys:
    reader = _reader(inputs)

    def body(t, sums):
        read = reader(t)
        weights = read.token.e * read.u[None, :]
        k = weights * (read.pairs[:, None] - read.dp[None, :])
        return sums[0] + k, sums[1] + jnp.sum(weights, axis=1)[:, None] * read.dy[None, :]

    n, d = shape.wide_latents, shape.wide_size
    return Keys(*_by_tokens(body, shape, (shape.chunk, n), (shape.chunk, d)))
