"""The forward pass of the fused kernels.

1. Latte's `incoming`, for groups of chunks: the state that comes to each.
2. `_states`, for each group: walks its chunks and keeps the state before each.
3. `_outputs`, for each chunk: the window's weights and Latte's, added, times v, and what the window
   reads of earlier chunks and the latents of the state.

All chunks' outputs are made at once, so that no program holds a state, a window and outputs
together for longer than one chunk. Chunks in which Latte's sums come near underflow are made again,
their latents token by token, by a kernel of its own.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from latte.ops.attention.gpu_block import store_numbers
from latte.ops.latte import gpu_block as block
from latte.ops.latte import gpu_forward
from latte.ops.latte.gpu_backward import repair
from latte.ops.latte.gpu_block import Carry, Chunk, Edge
from latte.ops.latte.gpu_forward import (
    States,
    by_tokens,
    group_size,
    in_products,
    incoming,
    with_last,
)
from latte.ops.macchiato.gpu_block import Call, Inputs, Near
from latte.ops.macchiato.gpu_window import attend


class Arrays(NamedTuple):
    """What a call is given; `v_past` and `kw`, and their run numbers, begin before the others."""

    q: Float[Array, "B T H L"]
    k: Float[Array, "B T H N"]
    v: Float[Array, "B T G D"]
    run: Int[Array, "B T"]
    run_past: Int[Array, "B S"]
    qw: Float[Array, "B T H K"]
    kw: Float[Array, "B S G K"]
    v_past: Float[Array, "B S G D"]


class Kept(NamedTuple):
    """What the backward pass reads: of the latents, and of the window the largest raw logit of each
    query, and log2 of its sum."""

    latents: gpu_forward.Kept
    m: Float[Array, "B H T"]
    l: Float[Array, "B H T"]


def _states_kernel(
    k_ref, v_ref, run_ref, m_ref, total_ref, s_ref, m_out, total_out, s_out, *, call, group
):
    shape = call.shape
    first = pl.program_id(1) * (group * shape.chunk)

    def body(i, carry):
        m_out[i, :] = carry.edge.m
        total_out[i, :] = carry.edge.total
        s_out[i, :, :] = carry.s.astype(s_out.dtype)
        rows = block.rows(shape, first, i, group)
        return block.update(rows.keys(k_ref), rows.values(v_ref), rows.runs(run_ref, first), carry)

    edge = Edge(m_ref[0, :], total_ref[0, :], block.run_before(run_ref, first))
    carry = Carry(edge, s_ref[0, :, :])
    jax.lax.fori_loop(0, block.chunks_here(shape, first, group), body, carry)


def _states(arrays: Arrays, groups: States, call: Call) -> States:
    shape, tiles = call.shape, call.tiles
    group = group_size(shape, tiles)
    tokens = group * shape.chunk
    sums, states = shape.sums_array(shape.chunks), shape.states_array(shape.chunks, arrays.v.dtype)
    out = call.kernel(
        partial(_states_kernel, group=group),
        "states",
        shape.grid(group),
        tiles.state_warps,
        tiles.stages,
        in_specs=[
            *[shape.latent_rows(tokens), shape.shared_rows(tokens), shape.runs(tokens)],
            *[shape.sums(1), shape.sums(1), shape.states(1)],
        ],
        out_specs=[shape.sums(group), shape.sums(group), shape.states(group)],
        out_shape=[sums, sums, states],
    )(arrays.k, arrays.v, arrays.run, *groups)
    return States(*out)


def _inputs(refs: tuple, first: Array, i: Array | int, group: int, call: Call) -> Inputs:
    rows = block.rows(call.shape, first, i, group)
    return Inputs((*refs[:3], None, *refs[3:7]), first, i, rows, call, Near(*refs[7:11]))


def _outputs_kernel(*refs, call: Call):
    y_ref, exact_ref, top_ref, m_ref, l_ref = refs[11:]
    inputs = _inputs(refs, pl.program_id(1) * call.shape.chunk, 0, 1, call)
    p0, p = inputs.states
    u, weights, m, l = attend(inputs, p0)
    at = inputs.index * call.shape.chunk + block.cells(call.shape.chunk)
    store_numbers(m_ref, m, at, call.plan.queries)
    store_numbers(l_ref, l, at, call.plan.queries)
    carry = Carry(inputs.edge, inputs.s)
    a, read, latents = in_products(p, inputs.k, inputs.run, carry, y_ref.dtype)
    y = u + read + block.product(a + weights, inputs.v, y_ref.dtype)
    inputs.rows.store_values(y_ref, y)
    exact_ref[0] = latents.exact.astype(jnp.int32)
    top_ref[0, :] = latents.top


def _repair_kernel(*refs, call: Call, group: int):
    y_ref = refs[13]

    def visit(latents):
        inputs = _inputs(refs, latents.first, latents.i, group, call)
        p0, p = inputs.states
        u, weights, _, _ = attend(inputs, p0)
        v = inputs.v
        carry = Carry(inputs.edge, inputs.s.astype(jnp.float32))
        y = u + block.product(weights, v, y_ref.dtype)
        y = y + by_tokens(Chunk(p, inputs.k, v, inputs.run), carry)
        inputs.rows.store_values(y_ref, y)

    repair((*refs[:3], None, *refs[3:7]), refs[11], call.shape, group, visit)


def _outputs(arrays: Arrays, states: States, call: Call) -> tuple[Float[Array, "B T H D"], Kept]:
    shape, tiles = call.shape, call.tiles

    def specs(group: int) -> list[pl.BlockSpec]:
        tokens = group * shape.chunk
        return [
            *[call.state_rows(tokens), shape.latent_rows(tokens), shape.shared_rows(tokens)],
            *[shape.runs(tokens), edges, edges, shape.states(group)],
            *[call.runs(), call.query_rows(), *call.key_rows()],
        ]

    edges = shape.all_sums(shape.chunks + 1)
    inputs = *arrays[:4], *states, *arrays[4:]
    numbers = call.numbers_array()
    batch, length, heads = arrays.q.shape[:3]
    y_array = jax.ShapeDtypeStruct((batch, length, heads, shape.size), arrays.v.dtype)
    y, exact, top, m, l = call.kernel(
        _outputs_kernel,
        "outputs",
        shape.grid(1),
        tiles.output_warps,
        tiles.window_stages,
        in_specs=specs(1),
        out_specs=[
            *[shape.value_rows(shape.chunk), shape.flags(1), shape.sums(1)],
            *[call.own_numbers()] * 2,
        ],
        out_shape=[
            y_array,
            jax.ShapeDtypeStruct((batch, heads, shape.chunks), jnp.int32),
            shape.sums_array(shape.chunks),
            *[numbers] * 2,
        ],
    )(*inputs)
    group = group_size(shape, tiles)
    values = shape.value_rows(group * shape.chunk)
    y = call.kernel(
        partial(_repair_kernel, group=group),
        "repair",
        shape.grid(group),
        8,
        1,
        in_specs=[*specs(group), shape.flags(group), values],
        out_specs=values,
        out_shape=y_array,
        input_output_aliases={len(inputs) + 1: 0},
    )(*inputs, exact, y)
    return y, Kept(gpu_forward.Kept(states, top, exact), m, l)


def forward(
    arrays: Arrays, state: tuple[Array, Array, Array], call: Call
) -> tuple[Float[Array, "B T H D"], tuple[Array, Array, Array], Kept]:
    """y, the latents' state (m, l, s) after it, and what the backward pass needs."""
    latents = arrays.k, arrays.v, arrays.run
    groups, after = incoming(latents, state, call.shape, call.tiles, call.interpret)
    states = with_last(_states(arrays, groups, call), groups)
    y, kept = _outputs(arrays, states, call)
    return y, after, kept
