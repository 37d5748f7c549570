"""The forward pass of Latte on GPUs, in three kernels.

A head's sequence is cut into groups of chunks, because heads alone do not fill a device:

1. `_gather`, for each group: the state that its tokens alone make (of the last document in it).
2. `_chain`, for each part of a state: merges the groups' states one after another.
3. `_outputs`, for each group: walks its chunks from the state that came to it, and writes y.

A chunk in which a normaliser comes near underflow makes its group say so, and `_outputs` runs a
second time, over those groups alone and token by token. That is another kernel, not a branch,
because a loop within the loop over chunks would keep Triton from overlapping loads with products.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, DTypeLike, Float, Int

from latte.ops.latte import gpu_block as block
from latte.ops.latte.gpu_block import (
    Carry,
    Chunk,
    Documents,
    Edge,
    Shape,
    Tiles,
    Weights,
    params,
)


class States(NamedTuple):
    """The states that come to each group or chunk; padded."""

    m: Float[Array, "B H n N"]
    total: Float[Array, "B H n N"]
    s: Float[Array, "B H n N D"]


class Kept(NamedTuple):
    """What the backward pass reads: the states before each chunk, s in the type of v, and m and
    total after the last one too; the largest logit that a chunk sees; which chunks are exact."""

    states: States
    top: Float[Array, "B H n N"]
    exact: Int[Array, "B H n"]


def with_last(chunks: States, groups: States) -> States:
    """The states before each chunk, and m and total after the last one as `incoming` gives them."""

    def join(x: Array, after: Array) -> Array:
        return jnp.concatenate([x, after[:, :, -1:]], axis=2)

    return States(join(chunks.m, groups.m), join(chunks.total, groups.total), chunks.s)


def group_size(shape: Shape, tiles: Tiles) -> int:
    """Chunks of a group: as many programs as an H100 or H200 runs at once, where there is so much
    to do."""
    if tiles.group is not None:
        return tiles.group
    chunks = shape.batch * shape.heads * shape.chunks
    return min(32, pl.next_power_of_2(max(1, chunks // 256)))


def _gather_kernel(k_ref, v_ref, run_ref, m_ref, total_ref, s_ref, *, shape: Shape, group: int):
    first = pl.program_id(1) * (group * shape.chunk)

    def body(i, carry):
        rows = block.rows(shape, first, i, group)
        return block.update(rows.keys(k_ref), rows.values(v_ref), rows.runs(run_ref, first), carry)

    n, d = shape.wide_latents, shape.wide_size
    nothing = Edge(
        jnp.full((n,), -jnp.inf, jnp.float32), jnp.zeros((n,), jnp.float32), jnp.int32(-1)
    )
    empty = Carry(nothing, jnp.zeros((n, d), jnp.float32))
    carry = jax.lax.fori_loop(0, block.chunks_here(shape, first, group), body, empty)
    m_ref[0, :] = carry.edge.m
    total_ref[0, :] = carry.edge.total
    s_ref[0, :, :] = carry.s


def _gather(k: Array, v: Array, run: Array, shape: Shape, tiles: Tiles, interpret: bool) -> States:
    group = group_size(shape, tiles)
    tokens = group * shape.chunk
    groups = pl.cdiv(shape.length, tokens)
    out = pl.pallas_call(
        partial(_gather_kernel, shape=shape, group=group),
        grid=shape.grid(group),
        in_specs=[shape.latent_rows(tokens), shape.shared_rows(tokens), shape.runs(tokens)],
        out_specs=[shape.sums(1), shape.sums(1), shape.states(1)],
        out_shape=[*[shape.sums_array(groups)] * 2, shape.states_array(groups)],
        compiler_params=params(tiles.state_warps, tiles.stages),
        interpret=interpret,
        name="latte_gather",
    )(k, v, run)
    return States(*out)


def _chain_kernel(
    run_ref, m0, l0, s0, m_ref, total_ref, s_ref, m_out, total_out, s_out, *, shape, tokens, ahead
):
    """m_out[j] and so on are the state before group j; the last one is that after all of them."""
    (n, d), groups = s_ref.shape[1:], s_ref.shape[0]
    column, latent = pl.program_id(0), pl.program_id(1)
    real_latents = block.cells(n) < shape.latents - latent * n
    real = real_latents[:, None] & (block.cells(d) < shape.size - column * d)[None, :]

    def write(j, m, total, s):
        m_out[j, :] = m
        total_out[j, :] = total
        s_out[j, :, :] = s

    def step(j, carry, here):
        m, total, s, before = carry
        m_here, total_here, s_here = here
        write(j, m, total, s)
        last = run_ref[jnp.minimum((j + 1) * tokens, shape.length) - 1]
        m = jnp.where(last == before, m, -jnp.inf)
        top = jnp.maximum(m, m_here)
        old, new = block.exp(m - top) * total, block.exp(m_here - top) * total_here
        total = old + new
        s = (old / total)[:, None] * s + (new / total)[:, None] * s_here
        return top, total, s, last

    def steps(first, carry, count):
        here = [
            (m_ref[first + i, :], total_ref[first + i, :], s_ref[first + i, :, :])
            for i in range(count)
        ]
        for i in range(count):
            carry = step(first + i, carry, here[i])
        return carry

    carry = (
        plgpu.load(m0.at[:], mask=real_latents, other=0.0),
        block.exp(plgpu.load(l0.at[:], mask=real_latents, other=0.0)),
        plgpu.load(s0.at[:, :], mask=real, other=0.0),
        jnp.int32(0),
    )
    whole = groups // ahead
    if whole:
        carry = jax.lax.fori_loop(0, whole, lambda i, c: steps(i * ahead, c, ahead), carry)
    m, total, s, _ = steps(whole * ahead, carry, groups % ahead)
    write(groups, m, total, s)


def _chain(
    run: Array,
    state: tuple[Array, Array, Array],
    local: States,
    shape: Shape,
    tokens: int,
    tiles: Tiles,
    interpret: bool,
) -> States:
    groups = local.m.shape[2]
    n, d = min(tiles.chain_latents, shape.wide_latents), min(tiles.chain_values, shape.wide_size)
    vector = pl.BlockSpec((None, None, n), lambda j, i, h, b: (b, h, i))
    matrix = pl.BlockSpec((None, None, n, d), lambda j, i, h, b: (b, h, i, j))

    def vectors(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, count, n), lambda j, i, h, b: (b, h, 0, i))

    def matrices(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, count, n, d), lambda j, i, h, b: (b, h, 0, i, j))

    # Programs that share latents write the same m and total.
    out = pl.pallas_call(
        partial(_chain_kernel, shape=shape, tokens=tokens, ahead=tiles.chain_ahead),
        grid=(shape.wide_size // d, shape.wide_latents // n, shape.heads, shape.batch),
        in_specs=[
            pl.BlockSpec((None, shape.length), lambda j, i, h, b: (b, 0)),
            *[vector, vector, matrix],
            *[vectors(groups), vectors(groups), matrices(groups)],
        ],
        out_specs=[vectors(groups + 1), vectors(groups + 1), matrices(groups + 1)],
        out_shape=[*[shape.sums_array(groups + 1)] * 2, shape.states_array(groups + 1)],
        compiler_params=params(1, 1),
        interpret=interpret,
        name="latte_chain",
    )(run, *state, *local)
    return States(*out)


def in_products(
    p: Float[Array, "C N"],
    k: Float[Array, "C N"],
    run: Documents,
    carry: Carry,
    dtype: DTypeLike,
) -> tuple[Float[Array, "C C"], Float[Array, "C D"], Weights]:
    """The weights of a chunk's tokens, what its outputs read of the state, and of what they are
    made."""
    weights = block.weigh(k, run, carry.edge, block.largest(k, run, carry.edge), dtype)
    u = p * block.reciprocal(weights.cum)
    a = jnp.where(weights.pairs, block.product(u, weights.e, dtype, over=(1, 1)), 0.0)
    return a, block.product(u * weights.past, carry.s, dtype), weights


def by_tokens(chunk: Chunk, carry: Carry) -> Float[Array, "C D"]:
    """A chunk's outputs, one token after another."""

    def body(t, y):
        token = block.token(t, chunk, carry.edge)
        u = token.p / token.total
        a = jnp.sum(token.e * u[None, :], axis=1)
        new = jnp.sum(a[:, None] * chunk.v.astype(jnp.float32), axis=0)
        new = new + jnp.sum((u * token.past)[:, None] * carry.s, axis=0)
        return jnp.where(token.here[:, None], new[None, :], y)

    zeros = jnp.zeros(chunk.v.shape, jnp.float32)
    return jax.lax.fori_loop(0, chunk.v.shape[0], body, zeros)


def _walk(refs: tuple, first: Array, shape: Shape, group: int, visit: Callable) -> None:
    """Calls visit(i, rows, chunk, carry) for each chunk of the group that starts at token first."""
    q_ref, k_ref, v_ref, run_ref, m_ref, total_ref, s_ref = refs

    def body(i, carry):
        rows = block.rows(shape, first, i, group)
        chunk = Chunk(
            rows.softmax(q_ref), rows.keys(k_ref), rows.values(v_ref), rows.runs(run_ref, first)
        )
        visit(i, rows, chunk, carry)
        return block.update(chunk.k, chunk.v, chunk.run, carry)

    edge = Edge(m_ref[0, :], total_ref[0, :], block.run_before(run_ref, first))
    carry = Carry(edge, s_ref[0, :, :])
    jax.lax.fori_loop(0, block.chunks_here(shape, first, group), body, carry)


def _outputs_kernel(*refs, shape: Shape, group: int):
    """Writes y and which chunks are exact, and to `kept` the state before each chunk and `top`."""
    y_ref, exact_ref, *kept = refs[7:]

    def visit(i, rows, chunk, carry):
        a, y, weights = in_products(chunk.p, chunk.k, chunk.run, carry, y_ref.dtype)
        rows.store_values(y_ref, y + block.product(a, chunk.v, y_ref.dtype))
        exact_ref[i] = weights.exact.astype(jnp.int32)
        if kept:
            kept[0][i, :] = carry.edge.m
            kept[1][i, :] = carry.edge.total
            kept[2][i, :, :] = carry.s.astype(y_ref.dtype)
            kept[3][i, :] = weights.top

    _walk(refs[:7], pl.program_id(1) * (group * shape.chunk), shape, group, visit)


def _repair_kernel(*refs, shape: Shape, group: int):
    """Writes again the outputs of groups in which a chunk is not exact."""
    exact_ref, _, y_ref = refs[7:]
    first = pl.program_id(1) * (group * shape.chunk)
    here = block.cells(group) < shape.chunks - pl.program_id(1) * group
    exact = plgpu.load(exact_ref.at[:], mask=here, other=1)

    @pl.when(jnp.min(exact) == 0)
    def _():
        def visit(i, rows, chunk, carry):
            rows.store_values(y_ref, by_tokens(chunk, carry))

        _walk(refs[:7], first, shape, group, visit)


def _outputs(
    arrays: tuple[Array, Array, Array, Array],
    states: States,
    shape: Shape,
    tiles: Tiles,
    keep: bool,
    interpret: bool,
) -> tuple[Float[Array, "B T H D"], Kept | None]:
    """y and, to `keep`, what the backward pass needs."""
    v = arrays[2]
    group = group_size(shape, tiles)
    tokens = group * shape.chunk
    inputs = [
        *[shape.latent_rows(tokens)] * 2,
        *[shape.value_rows(tokens), shape.runs(tokens)],
        *[shape.sums(1), shape.sums(1), shape.states(1)],
    ]
    count = shape.chunks
    grid = shape.grid(group)
    y_array = jax.ShapeDtypeStruct(v.shape, v.dtype)
    exact_array = jax.ShapeDtypeStruct((shape.batch, shape.heads, count), jnp.int32)
    sums = shape.sums(group), shape.sums_array(count)
    kept_specs = [sums[0], sums[0], shape.states(group), sums[0]]
    kept_arrays = [sums[1], sums[1], shape.states_array(count, v.dtype), sums[1]]
    y, exacts, *kept = pl.pallas_call(
        partial(_outputs_kernel, shape=shape, group=group),
        grid=grid,
        in_specs=inputs,
        out_specs=[shape.value_rows(tokens), shape.flags(group), *(kept_specs if keep else [])],
        out_shape=[y_array, exact_array, *(kept_arrays if keep else [])],
        compiler_params=params(tiles.output_warps, tiles.stages),
        name="latte_outputs",
        interpret=interpret,
    )(*arrays, *states)
    y = pl.pallas_call(
        partial(_repair_kernel, shape=shape, group=group),
        grid=grid,
        in_specs=[*inputs, shape.flags(group), shape.value_rows(tokens)],
        out_specs=shape.value_rows(tokens),
        out_shape=y_array,
        input_output_aliases={len(inputs) + 1: 0},
        compiler_params=params(8, 1),
        interpret=interpret,
        name="latte_repair",
    )(*arrays, *states, exacts, y)
    if not keep:
        return y, None
    *before, top = kept
    return y, Kept(with_last(States(*before), states), top, exacts)


def incoming(
    arrays: tuple[Array, Array, Array],
    state: tuple[Array, Array, Array],
    shape: Shape,
    tiles: Tiles,
    interpret: bool,
) -> tuple[States, tuple[Array, Array, Array]]:
    """The states that come to each group, and the state (m, l, s) after (k, v, run)."""
    tokens = group_size(shape, tiles) * shape.chunk
    local = _gather(*arrays, shape, tiles, interpret)
    states = _chain(arrays[2], state, local, shape, tokens, tiles, interpret)
    m, total = (x[:, :, -1, : shape.latents] for x in (states.m, states.total))
    return states, (m, jnp.log(total), states.s[:, :, -1, : shape.latents, : shape.size])


def forward(
    arrays: tuple[Array, Array, Array, Int[Array, "B T"]],
    state: tuple[Float[Array, "B H N"], Float[Array, "B H N"], Float[Array, "B H N D"]],
    shape: Shape,
    tiles: Tiles,
    keep: bool,
    interpret: bool,
) -> tuple[Array, tuple[Array, Array, Array], Kept | None]:
    """y of (q, k, v, run), the state (m, l, s) after it, and what the backward pass needs."""
    states, after = incoming(arrays[1:], state, shape, tiles, interpret)
    y, kept = _outputs(arrays, states, shape, tiles, keep, interpret)
    return y, after, kept
