"""The backward pass of Latte on GPUs, in three kernels over the chunks.

The forward pass kept the state before each chunk. With dp_t = S_t dy_t, and W_ts the share of token
s in latent n of S_t, the gradient of a softmax gives

    dq_t = p_t (dp_t − Σ_n p_t dp_t)
    dv_s = Σ_{t≥s} Σ_n p_t W_ts dy_t
    dk_s = Σ_{t≥s} p_t W_ts (v_sᵀ dy_t − dp_t)

and what comes from later chunks depends on two sums alone, at their common edge e:

    ds = Σ_{t>e} p_t W_te dy_tᵀ            [N, D]  W_te: the share of the whole state at e in S_t
    g  = Σ_{t>e} p_t W_te dp_t             [N]

1. `_queries`, for each chunk: dq, what its own tokens add to ds and g at its start, and two numbers
   a token and latent that spare `_keys` the normalisers and the state.
2. `_chain`, for each part of a state: both sums at every chunk's end, from the last to the first.
3. `_keys`, for each chunk: dk and dv, from its own tokens and from ds and g.

The first and the last run a second time, token by token, over the groups of chunks that the forward
pass found inexact.

The gradient of l at an edge is s·ds − g: a larger l raises the state's share, and lowers the rest.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, DTypeLike, Float

from latte.ops.latte import gpu_block as block
from latte.ops.latte.gpu_block import Ref, Shape, Tiles, params
from latte.ops.latte.gpu_forward import Kept, group_size
from latte.ops.latte.gpu_gradients import (
    Inputs,
    Keys,
    Queries,
    Reads,
    keys_by_tokens,
    keys_in_products,
    queries_by_tokens,
    queries_in_products,
)


def _write_queries(refs: tuple, inputs: Inputs, p: Float[Array, "C N"], grads: Queries) -> None:
    dq_ref, ds_ref, g_ref = refs
    inputs.rows.store_latents(dq_ref, p * (grads.p - jnp.sum(p * grads.p, axis=1)[:, None]))
    ds_ref[inputs.i, :, :] = grads.ds
    g_ref[inputs.i, :] = grads.g


def add_later(refs: tuple, inputs: Inputs, grads: Keys) -> Keys:
    """Adds what later chunks say of the tokens, by way of the state after the chunk."""
    dtype = inputs.refs[2].dtype
    ds, g = refs[0][inputs.i, :, :], refs[1][inputs.i, :]
    new = block.added(inputs.k, inputs.run, inputs.after)
    k = block.product(inputs.v, ds, dtype, over=(1, 1)) - g[None, :]
    return Keys(grads.k + new * k, grads.v + block.product(new, ds, dtype))


def _write_keys(refs: tuple, inputs: Inputs, grads: Keys) -> None:
    inputs.rows.store_latents(refs[0], grads.k)
    inputs.rows.store_values(refs[1], grads.v)


def store_reads(refs: tuple, inputs: Inputs, reads: Reads) -> None:
    for ref, x in zip(refs, reads, strict=True):
        inputs.rows.store_latents(ref, x)


def load_reads(refs: tuple, inputs: Inputs) -> Reads:
    return Reads(*(inputs.rows.load(ref, inputs.rows.shape.latents) for ref in refs))


def _queries_kernel(*refs, shape: Shape):
    """Refs: 9 of `Inputs`; dq, ds, g, old and `Reads`."""
    first = pl.program_id(1) * shape.chunk
    inputs = Inputs(refs[:9], first, 0, block.rows(shape, first, 0, 1))
    p = inputs.p
    grads, reads = queries_in_products(inputs, p)
    store_reads(refs[13:], inputs, reads)
    _write_queries(refs[9:12], inputs, p, grads)
    refs[12][0, :] = block.kept(inputs.edge, inputs.after)


def _keys_kernel(*refs, shape: Shape):
    """Refs: 9 of `Inputs`; later ds and g, and `Reads`; dk and dv."""
    first = pl.program_id(1) * shape.chunk
    inputs = Inputs(refs[:9], first, 0, block.rows(shape, first, 0, 1))
    grads = keys_in_products(inputs, load_reads(refs[11:13], inputs))
    _write_keys(refs[13:], inputs, add_later(refs[9:11], inputs, grads))


def repair(refs: tuple, exact_ref: Ref, shape: Shape, group: int, visit: Callable) -> None:
    """Calls visit(inputs) for the chunks of a group in which one is not exact."""
    first = pl.program_id(1) * (group * shape.chunk)
    here = block.cells(group) < shape.chunks - pl.program_id(1) * group
    exact = plgpu.load(exact_ref.at[:], mask=here, other=1)

    def body(i, _):
        visit(Inputs(refs, first, i, block.rows(shape, first, i, group)))

    @pl.when(jnp.min(exact) == 0)
    def _():
        jax.lax.fori_loop(0, block.chunks_here(shape, first, group), body, None)


def _repair_queries_kernel(*refs, shape: Shape, group: int):
    def visit(inputs):
        _write_queries(refs[13:], inputs, inputs.p, queries_by_tokens(inputs, shape))

    repair(refs[:9], refs[9], shape, group, visit)


def _repair_keys_kernel(*refs, shape: Shape, group: int):
    def visit(inputs):
        grads = keys_by_tokens(inputs, shape)
        _write_keys(refs[14:], inputs, add_later(refs[9:11], inputs, grads))

    repair(refs[:9], refs[11], shape, group, visit)


def _chain_kernel(ds_ref, g_ref, old_ref, ds_last, g_last, ds_out, g_out, ds0, g0, *, ahead: int):
    """ds_out[i] and g_out[i] are the sums at the end of chunk i, ds0 and g0 those at the start."""
    chunks = old_ref.shape[0]

    def steps(last, carry, count):
        rows = [last - i for i in range(count)]
        here = [(ds_ref[i, :, :], g_ref[i, :], old_ref[i, :]) for i in rows]
        for i, (ds_here, g_here, old) in zip(rows, here, strict=True):
            ds, g = carry
            ds_out[i, :, :] = ds.astype(ds_out.dtype)
            g_out[i, :] = g
            carry = ds_here + old[:, None] * ds, g_here + old * g
        return carry

    carry = ds_last[:, :], g_last[:]
    whole = chunks // ahead
    if whole:
        carry = jax.lax.fori_loop(
            0, whole, lambda i, c: steps(chunks - 1 - i * ahead, c, ahead), carry
        )
    ds0[:, :], g0[:] = steps(chunks % ahead - 1, carry, chunks % ahead)


def _chain(
    local: tuple[Array, Array, Array],
    after: tuple[Array, Array],
    shape: Shape,
    dtype: DTypeLike,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Array, ...]:
    n, d = min(tiles.chain_latents, shape.wide_latents), min(tiles.chain_values, shape.wide_size)
    count = shape.chunks
    vector = pl.BlockSpec((None, None, n), lambda j, i, h, b: (b, h, i))
    matrix = pl.BlockSpec((None, None, n, d), lambda j, i, h, b: (b, h, i, j))
    vectors = pl.BlockSpec((None, None, count, n), lambda j, i, h, b: (b, h, 0, i))
    matrices = pl.BlockSpec((None, None, count, n, d), lambda j, i, h, b: (b, h, 0, i, j))
    # Programs that share latents write the same g.
    out = pl.pallas_call(
        partial(_chain_kernel, ahead=tiles.chain_ahead),
        grid=(shape.wide_size // d, shape.wide_latents // n, shape.heads, shape.batch),
        in_specs=[matrices, vectors, vectors, matrix, vector],
        out_specs=[matrices, vectors, matrix, vector],
        out_shape=[
            *[shape.states_array(count, dtype), shape.sums_array(count)],
            *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in after],
        ],
        compiler_params=params(1, 1),
        interpret=interpret,
        name="latte_chain_transpose",
    )(*local, *after)
    return tuple(out)


def carry_back(
    local: tuple[Array, Array, Array],
    ends: tuple[Float[Array, "B H N D"], Float[Array, "B H N D"]],
    cotangents: tuple[Array, Array],
    shape: Shape,
    dtype: DTypeLike,
    tiles: Tiles,
    interpret: bool,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """ds and g at each chunk's end, and the gradients of the first l and s.

    `local` are what each chunk adds to ds and g at its start, and the old state's share after it;
    `ends` the first and the last s; `cotangents` those of the last l and s.
    """
    (s_first, s_last), (dl, ds) = ends, cotangents
    after = _wide(ds, shape), _wide(jnp.sum(s_last * ds, axis=3) - dl, shape)
    ds_later, g_later, ds, g = _chain(local, after, shape, dtype, tiles, interpret)
    ds, g = ds[:, :, : shape.latents, : shape.size], g[:, :, : shape.latents]
    # As the kernels read s, so that the difference is one of the same terms.
    dl = jnp.sum(s_first.astype(dtype) * ds, axis=3) - g
    return (ds_later, g_later), (dl, ds)


def _wide(x: Array, shape: Shape) -> Array:
    """Pads a state's latents, and values where it has them."""
    wide = (shape.wide_latents, shape.wide_size)[: x.ndim - 2]
    sizes = zip(wide, x.shape[2:], strict=True)
    return jnp.pad(x, [(0, 0), (0, 0), *((0, w - n) for w, n in sizes)])


def _specs(shape: Shape, group: int) -> tuple[list, list, list]:
    """Of what `Inputs` reads; of a gradient of q and of v; of a vector and a matrix."""
    tokens = group * shape.chunk
    rows = [shape.latent_rows(tokens), shape.value_rows(tokens)]
    sums = [shape.sums(group), shape.states(group)]
    inputs = [*rows[:1] * 2, *rows[1:] * 2, shape.runs(tokens), *state_specs(shape, group)]
    return inputs, rows, sums


def state_specs(shape: Shape, group: int) -> list[pl.BlockSpec]:
    """Of m, total, s and top, as `Inputs` reads them."""
    edges = shape.all_sums(shape.chunks + 1)
    return [edges, edges, shape.states(group), shape.all_sums(shape.chunks)]


def _like(*arrays: Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _queries(
    inputs: tuple[Array, ...], exact: Array, shape: Shape, tiles: Tiles, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array], Reads]:
    """dq; for each chunk its own ds and g at its start, and the old state's share after it; and
    what `_keys` reads."""
    specs, (latents, _), (vector, matrix) = _specs(shape, 1)
    vectors, matrices = shape.sums_array(shape.chunks), shape.states_array(shape.chunks)
    reads = jax.ShapeDtypeStruct(inputs[1].shape, inputs[2].dtype)
    *grads, old, u, mean = pl.pallas_call(
        partial(_queries_kernel, shape=shape),
        grid=shape.grid(1),
        in_specs=specs,
        out_specs=[latents, matrix, vector, vector, latents, latents],
        out_shape=[*_like(inputs[0]), matrices, vectors, vectors, reads, reads],
        compiler_params=params(tiles.query_warps, 1),
        interpret=interpret,
        name="latte_queries",
    )(*inputs)
    group = group_size(shape, tiles)
    specs, (latents, _), (vector, matrix) = _specs(shape, group)
    dq, ds, g = pl.pallas_call(
        partial(_repair_queries_kernel, shape=shape, group=group),
        grid=shape.grid(group),
        in_specs=[*specs, shape.flags(group), latents, matrix, vector],
        out_specs=[latents, matrix, vector],
        out_shape=_like(*grads),
        input_output_aliases={10: 0, 11: 1, 12: 2},
        compiler_params=params(8, 1),
        interpret=interpret,
        name="latte_repair_queries",
    )(*inputs, exact, *grads)
    return dq, (ds, g, old), Reads(u, mean)


def _keys(
    inputs: tuple[Array, ...],
    reads: Reads,
    later: tuple[Array, Array],
    exact: Array,
    shape: Shape,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Array, Array]:
    """dk and dv; `later` are ds and g at each chunk's end."""
    specs, rows, (vector, matrix) = _specs(shape, 1)
    grads = pl.pallas_call(
        partial(_keys_kernel, shape=shape),
        grid=shape.grid(1),
        in_specs=[*specs, matrix, vector, rows[0], rows[0]],
        out_specs=rows,
        out_shape=_like(*inputs[1:3]),
        compiler_params=params(tiles.key_warps, 1),
        interpret=interpret,
        name="latte_keys",
    )(*inputs, *later, *reads)
    group = group_size(shape, tiles)
    specs, rows, (vector, matrix) = _specs(shape, group)
    dk, dv = pl.pallas_call(
        partial(_repair_keys_kernel, shape=shape, group=group),
        grid=shape.grid(group),
        in_specs=[*specs, matrix, vector, shape.flags(group), *rows],
        out_specs=rows,
        out_shape=_like(*grads),
        input_output_aliases={12: 0, 13: 1},
        compiler_params=params(8, 1),
        interpret=interpret,
        name="latte_repair_keys",
    )(*inputs, *later, exact, *grads)
    return dk, dv


def backward(
    arrays: tuple[Array, ...],
    kept: Kept,
    ends: tuple[Float[Array, "B H N D"], Float[Array, "B H N D"]],
    cotangents: tuple[Array, Array, Array],
    shape: Shape,
    tiles: Tiles,
    interpret: bool,
) -> tuple[Array, Array, Array, Array, Array]:
    """(dq, dk, dv, dl, ds) from those of y, l and s.

    `arrays` are q, k, v and run, `ends` the first and the last s.
    """
    dy, dl, ds = cotangents
    inputs = *arrays[:3], dy, arrays[3], *kept.states, kept.top
    dq, local, reads = _queries(inputs, kept.exact, shape, tiles, interpret)
    dtype = arrays[2].dtype
    later, start = carry_back(local, ends, (dl, ds), shape, dtype, tiles, interpret)
    return dq, *_keys(inputs, reads, later, kept.exact, shape, tiles, interpret), *start
