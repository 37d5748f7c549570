"""The backward pass of the fused kernels.

With P_ts the window's softmax, δ_t = Σ_s P_ts dy_t · v_s, and dp as in Latte's backward pass (which
see for the latents), the softmax over all states and that of the window give

    dq_t0 = p_t0 (δ_t − r_t),  dq_tn = p_tn (dp_tn − r_t),  r_t = p_t0 δ_t + Σ_n p_tn dp_tn
    dz_ts = p_t0 P_ts (dy_t · v_s − δ_t)       of the window's logits
    dv_s = Σ_t (p_t0 P_ts + A_ts) dy_t

1. `_queries`, for each chunk: dq, the gradient of the window's queries, δ, and what its tokens add
   to the sums ds and g at its start.
2. Latte's chain of ds and g.
3. `_keys`, for each chunk: dk, the gradient of the window's keys, and dv.

`_past` makes those of the keys and values that a state brought. The first and the last kernel run
again, their latents token by token, where the forward pass was not exact. Heads that share keys and
values each write their own gradients of them, which are added up afterwards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from latte.ops.attention.gpu_block import (
    Sums,
    load_numbers,
    load_rows,
    padded,
    store_numbers,
    store_rows,
    tokens,
)
from latte.ops.latte import gpu_block as block
from latte.ops.latte.gpu_backward import (
    add_later,
    carry_back,
    load_reads,
    repair,
    state_specs,
    store_reads,
)
from latte.ops.latte.gpu_forward import group_size
from latte.ops.latte.gpu_gradients import (
    Queries,
    Reads,
    keys_by_tokens,
    keys_in_products,
    queries_by_tokens,
    queries_in_products,
)
from latte.ops.macchiato.gpu_block import Call, Inputs, Near
from latte.ops.macchiato.gpu_forward import Arrays, Kept
from latte.ops.macchiato.gpu_window import pull_keys, pull_queries


def _inputs(refs: tuple, first: Array, i: Array | int, group: int, call: Call) -> Inputs:
    rows = block.rows(call.shape, first, i, group)
    return Inputs(refs[:9], first, i, rows, call, Near(*refs[9:13]))


def _numbers(call: Call, refs: tuple, i: Array) -> list[Float[Array, " C"]]:
    """Numbers of the queries of chunk i."""
    here, at = pl.ds(i * call.shape.chunk, call.shape.chunk), tokens(i, call.shape.chunk)
    return [load_numbers(ref.at[here], at, call.plan.queries, 0.0) for ref in refs]


def _write_queries(
    refs: tuple, inputs: Inputs, states: tuple, grads: Queries, delta: Float[Array, " C"]
) -> None:
    (dq_ref, ds_ref, g_ref), (p0, p) = refs, states
    mean = p0 * delta + jnp.sum(p * grads.p, axis=1)
    inputs.store_states(dq_ref, p0 * (delta - mean), p * (grads.p - mean[:, None]))
    ds_ref[inputs.i, :, :] = grads.ds
    g_ref[inputs.i, :] = grads.g


def _queries_kernel(*refs, call: Call):
    """Refs: 9 of the latents, 4 of the window, m, l; dq, ds, g, old, dqw, δ, l over p0, `Reads`."""
    dqw_ref, delta_ref, share_ref = refs[19:22]
    inputs = _inputs(refs, pl.program_id(1) * call.shape.chunk, 0, 1, call)
    m, l = _numbers(call, refs[13:15], inputs.index)
    p0, p = inputs.states
    at = tokens(inputs.index, call.shape.chunk)
    dqw, delta = pull_queries(inputs, p0, m, l)
    store_rows(dqw_ref, dqw, at, call.plan.queries, call.plan.key_size)
    store_numbers(delta_ref, delta, at, call.plan.queries)
    store_numbers(share_ref, l - jnp.log2(p0), at, call.plan.queries)
    grads, reads = queries_in_products(inputs, p)
    store_reads(refs[22:], inputs, reads)
    _write_queries(refs[15:18], inputs, (p0, p), grads, delta)
    refs[18][0, :] = block.kept(inputs.edge, inputs.after)


def _repair_queries_kernel(*refs, call: Call, group: int):
    """Refs: 9 of the latents, δ, which are exact; dq, ds and g before and after."""

    def visit(latents):
        inputs = Inputs(refs[:9], latents.first, latents.i, latents.rows, call, Near(*[None] * 4))
        (delta,) = _numbers(call, refs[9:10], inputs.index)
        grads = queries_by_tokens(inputs, call.shape)
        _write_queries(refs[14:], inputs, inputs.states, grads, delta)

    repair(refs[:9], refs[10], call.shape, group, visit)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _own_rows(call: Call) -> pl.BlockSpec:
    """A chunk of the window's queries, or of gradients of its keys."""
    return call.shape.rows(padded(call.plan.key_size), call.shape.chunk)


def _latent_specs(call: Call, group: int) -> list[pl.BlockSpec]:
    """Of what `Inputs` reads of the latents."""
    shape, tokens = call.shape, group * call.shape.chunk
    return [
        *[call.state_rows(tokens), shape.latent_rows(tokens), shape.shared_rows(tokens)],
        *[shape.value_rows(tokens), shape.runs(tokens), *state_specs(shape, group)],
    ]


def _window_specs(call: Call) -> list[pl.BlockSpec]:
    return [call.runs(), call.query_rows(), *call.key_rows()]


def _queries(
    inputs: tuple, near: tuple, kept: Kept, call: Call
) -> tuple[Array, Array, tuple[Array, Array], tuple[Array, Array, Array], Reads]:
    """dq and dqw; l over p0 and δ; for each chunk its own ds and g, and the old state's share; and
    what `_keys` reads."""
    shape, tiles = call.shape, call.tiles
    specs, window = _latent_specs(call, 1), _window_specs(call)
    vector, matrix = shape.sums(1), shape.states(1)
    numbers, sums = call.numbers_array(), shape.sums_array(shape.chunks)
    q, qw = inputs[0], near[1]
    reads = jax.ShapeDtypeStruct(inputs[1].shape, call.plan.dtype)
    dq, ds, g, old, dqw, delta, share, u, mean = call.kernel(
        _queries_kernel,
        "queries",
        shape.grid(1),
        tiles.query_warps,
        tiles.window_stages,
        in_specs=[*specs, *window, *[call.numbers()] * 2],
        out_specs=[
            *[specs[0], matrix, vector, vector],
            *[_own_rows(call), *[call.own_numbers()] * 2, *[shape.latent_rows(shape.chunk)] * 2],
        ],
        out_shape=[
            *[_like(q), shape.states_array(shape.chunks), sums, sums],
            *[_like(qw), numbers, numbers, reads, reads],
        ],
    )(*inputs, *near, kept.m, kept.l)
    group = group_size(shape, tiles)
    specs = _latent_specs(call, group)
    outputs = [specs[0], shape.states(group), shape.sums(group)]
    dq, ds, g = call.kernel(
        partial(_repair_queries_kernel, group=group),
        "repair_queries",
        shape.grid(group),
        8,
        1,
        in_specs=[*specs, call.numbers(), shape.flags(group), *outputs],
        out_specs=outputs,
        out_shape=[_like(x) for x in (dq, ds, g)],
        input_output_aliases={11: 0, 12: 1, 13: 2},
    )(*inputs, delta, kept.latents.exact, dq, ds, g)
    return dq, dqw, (share, delta), (ds, g, old), Reads(u, mean)


def _reader(refs: tuple, call: Call) -> Callable[[Array], tuple[Array, Sums]]:
    """dy and the sums of a chunk of queries, from references to dy, m, l over p0, and δ."""

    def read(i: Array) -> tuple[Array, Sums]:
        at, here = tokens(i, call.shape.chunk), pl.ds(i * call.shape.chunk, call.shape.chunk)
        dy = load_rows(refs[0].at[here], at, call.plan.queries, call.plan.size)
        return dy, Sums(*_numbers(call, refs[1:], i))

    return read


def _keys_kernel(*refs, call: Call):
    """Refs: 9 of the latents, 4 of the window, dy, m, l over p0, δ, later ds and g, and `Reads`;
    dk, dv, dkw."""
    inputs = _inputs(refs, pl.program_id(1) * call.shape.chunk, 0, 1, call)
    grads = keys_in_products(inputs, load_reads(refs[19:21], inputs))
    dk, dv = add_later(refs[17:19], inputs, grads)
    inputs.rows.store_latents(refs[21], dk)
    dkw, dv = pull_keys(call, inputs.near, _reader(refs[13:17], call), inputs.index + call.past, dv)
    inputs.rows.store_values(refs[22], dv)
    at = tokens(inputs.index, call.shape.chunk)
    store_rows(refs[23], dkw, at, call.plan.queries, call.plan.key_size)


def _repair_keys_kernel(*refs, call: Call, group: int):
    """Refs: as of `_keys_kernel` to g, which are exact; dk and dv before and after."""

    def visit(latents):
        inputs = _inputs(refs, latents.first, latents.i, group, call)
        dk, dv = add_later(refs[17:19], inputs, keys_by_tokens(inputs, call.shape))
        inputs.rows.store_latents(refs[22], dk)
        read = _reader(refs[13:17], call)
        _, dv = pull_keys(call, inputs.near, read, inputs.index + call.past, dv)
        inputs.rows.store_values(refs[23], dv)

    repair(refs[:9], refs[19], call.shape, group, visit)


def _past_kernel(*refs, call: Call):
    """Refs: 4 of the window, dy, m, l over p0, δ; dkw and dv."""
    j, plan = pl.program_id(1), call.plan
    zeros = jnp.zeros((call.shape.chunk, padded(plan.size)), jnp.float32)
    dkw, dv = pull_keys(call, Near(*refs[:4]), _reader(refs[4:8], call), j, zeros)
    at = tokens(j, call.shape.chunk)
    store_rows(refs[8], dkw, at, plan.past, plan.key_size)
    store_rows(refs[9], dv, at, plan.past, plan.size)


def _keys(
    inputs: tuple, near: tuple, sums: tuple, later: tuple, reads: Reads, kept: Kept, call: Call
) -> tuple[Array, Array, Array]:
    """dk, dv and dkw of the call's own tokens, the last two for each query head."""
    shape, tiles = call.shape, call.tiles

    def specs(group: int) -> list[pl.BlockSpec]:
        window = [*_window_specs(call), call.cotangents(), *[call.numbers()] * 3]
        return [*_latent_specs(call, group), *window, shape.states(group), shape.sums(group)]

    arrays = *inputs, *near, *sums, *later
    dk, dv, dkw = call.kernel(
        _keys_kernel,
        "keys",
        shape.grid(1),
        tiles.key_warps,
        tiles.window_stages,
        in_specs=[*specs(1), *[shape.latent_rows(shape.chunk)] * 2],
        out_specs=[
            *[shape.latent_rows(shape.chunk), shape.value_rows(shape.chunk), _own_rows(call)]
        ],
        out_shape=[_like(inputs[1]), *_shared_arrays(call, shape.length)],
    )(*arrays, *reads)
    group = group_size(shape, tiles)
    outputs = [shape.latent_rows(group * shape.chunk), shape.value_rows(group * shape.chunk)]
    dk, dv = call.kernel(
        partial(_repair_keys_kernel, group=group),
        "repair_keys",
        shape.grid(group),
        8,
        1,
        in_specs=[*specs(group), shape.flags(group), *outputs],
        out_specs=outputs,
        out_shape=[_like(dk), _like(dv)],
        input_output_aliases={len(arrays) + 1: 0, len(arrays) + 2: 1},
    )(*arrays, kept.latents.exact, dk, dv)
    return dk, dv, dkw


def _past(near: tuple, sums: tuple, call: Call) -> tuple[Array, Array]:
    """dv and dkw of the tokens that a state brought, for each query head."""
    shape, rows = call.shape, _own_rows(call)
    dkw, dv = call.kernel(
        _past_kernel,
        "past",
        (shape.heads, call.past, shape.batch),
        call.tiles.key_warps,
        call.tiles.window_stages,
        in_specs=[*_window_specs(call), call.cotangents(), *[call.numbers()] * 3],
        out_specs=[rows, shape.value_rows(shape.chunk)],
        out_shape=_shared_arrays(call, call.plan.past)[::-1],
    )(*near, *sums)
    return dv, dkw


def _shared_arrays(call: Call, length: int) -> list[jax.ShapeDtypeStruct]:
    """Gradients of v and kw for each query head; those that will be added up are not rounded."""
    shape, plan = call.shape, call.plan
    dtype = plan.dtype if plan.share == 1 else jnp.float32
    rows = shape.batch, length, shape.heads
    return [jax.ShapeDtypeStruct((*rows, size), dtype) for size in (plan.size, plan.key_size)]


def _over_heads(x: Float[Array, "B T H X"], share: int) -> Float[Array, "B T G X"]:
    """Adds up the gradients of heads that share keys and values."""
    if share == 1:
        return x
    return jnp.sum(x.reshape(*x.shape[:2], -1, share, x.shape[3]), axis=3)


def backward(
    arrays: Arrays,
    kept: Kept,
    ends: tuple[Float[Array, "B H N D"], Float[Array, "B H N D"]],
    cotangents: tuple[Array, Array, Array],
    call: Call,
) -> tuple[Arrays, tuple[Array, Array]]:
    """The gradients of the arrays, those of v all in `v_past`, and of the state's l and s.

    `cotangents` are those of y, l and s; `ends` the first and the last s.
    """
    dy, *after = cotangents
    inputs = *arrays[:3], dy, arrays.run, *kept.latents.states, kept.latents.top
    near = arrays[4:]
    dq, dqw, (share, delta), local, reads = _queries(inputs, near, kept, call)
    later, (dl, ds) = carry_back(
        local, ends, (after[0], after[1]), call.shape, call.plan.dtype, call.tiles, call.interpret
    )
    sums = dy, kept.m, share, delta
    dk, *shared = _keys(inputs, near, sums, later, reads, kept, call)
    if call.past:
        past = _past(near, sums, call)
        shared = [jnp.concatenate(x, axis=1) for x in zip(past, shared, strict=True)]
    dv, dkw = (_over_heads(x, call.plan.share).astype(call.plan.dtype) for x in shared)
    none: Any = None
    grads = Arrays(dq, dk, jnp.zeros_like(arrays.v), none, none, dqw, dkw, dv)
    return grads, (dl, ds)
