"""The backward pass of Latte on TPU: the chunks' states again, then the chunks from last to first.

With X_t = Σ_{s≤t} (dy_t·v_s) e_s + f dy_t·s, all under the chunk's largest logit, and G, g the
gradients of the next state's s and z:

    dp = X / cum,  dq = p (dp − Σ p dp),  u = p / cum
    dv = Aᵀ dy + new G
    dk = e (Σ_{t≥s} (dy_t·v_s) u_t − Σ_{t≥s} u_t dp_t) + new (v Gᵀ + g)
    G  ← old G + f uᵀ dy,  g ← old g − f Σ u dp
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from latte.ops.latte import tpu_recurrence as recurrence
from latte.ops.latte.tpu_chunk import (
    NN,
    NT,
    Carry,
    Group,
    Layout,
    Masks,
    advance,
    column,
    dot,
    head_sums,
    inverse,
    masks,
    of_heads,
    only_head,
    per_head_rows,
    softmax,
    sums,
    update,
    weigh,
)
from latte.ops.latte.tpu_forward import (
    parameters,
    read_carry,
    runs_spec,
    scratch,
    slow_steps,
    state_shapes,
    state_specs,
    token_spec,
    write_carry,
)


def _states_kernel(
    layout: Layout,
    runs: Any,
    k: Any,
    v: Any,
    rows_before: Any,
    s_before: Any,
    rows_at: Any,
    s_at: Any,
    rows: Any,
    s: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        rows[...], s[...] = rows_before[...], s_before[...]

    rows_at[...], s_at[...] = rows[...], s[...]
    mask = masks(layout, runs)
    for group in layout.groups():
        carry = read_carry(group, rows, s)
        new = update(k[:, group.latents].astype(jnp.float32), carry.m, mask)
        write_carry(group, rows, s, advance(carry, new, group, v[:, group.values]))


def _chunk_state_specs(layout: Layout, last: int | None = None) -> list[pl.BlockSpec]:
    """Of the states before every chunk, [B, n, 2, H · N] and [B, n, H · N, D]."""
    width = layout.block * layout.latents

    def at(c: Array) -> Array | int:
        return c if last is None else last - c

    return [
        pl.BlockSpec((None, None, 2, width), lambda b, h, c: (b, at(c), 0, h)),
        pl.BlockSpec((None, None, width, layout.size), lambda b, h, c: (b, at(c), h, 0)),
    ]


def chunk_states(
    layout: Layout,
    runs: Int[Array, "B 2 T"],
    k: Float[Array, "B T HN"],
    v: Float[Array, "B T HD"],
    rows: Float[Array, "B 2 HN"],
    s: Float[Array, "B HN D"],
    interpret: Any,
) -> tuple[Float[Array, "B n 2 HN"], Float[Array, "B n HN D"]]:
    """The states before every chunk."""
    shapes = [
        jax.ShapeDtypeStruct((layout.batch, layout.chunks, *x.shape[1:]), x.dtype)
        for x in state_shapes(layout)
    ]
    return pl.pallas_call(
        functools.partial(_states_kernel, layout),
        grid=layout.grid,
        in_specs=[
            runs_spec(layout),
            token_spec(layout, layout.latents),
            token_spec(layout, layout.size),
            *state_specs(layout),
        ],
        out_specs=_chunk_state_specs(layout),
        out_shape=shapes,
        scratch_shapes=scratch(layout),
        compiler_params=parameters(),
        interpret=interpret,
        name="latte_states",
    )(runs, k, v, rows, s)


def _group_gradients(
    group: Group, refs: Any, gradients: Any, carry: Carry, ahead: Carry, mask: Masks
) -> tuple[Carry, Array]:
    """Writes dq, dk, dv of a group; the carried state's gradient, and whether products are exact.

    Where they are not, only what the next state says is in it.
    """
    q, k, v, dy = refs
    dq, dk, dv = gradients
    layout, lanes, dtype = group.layout, group.latents, group.layout.dtype
    key, values, grads = k[:, lanes].astype(jnp.float32), v[:, group.values], dy[:, group.values]
    w, new = weigh(layout, key, carry, mask), update(key, carry.m, mask)
    p = softmax(layout, q[:, lanes].astype(jnp.float32))
    by_cum = jnp.where(w.exact, inverse(w.cum), 0)
    u, weight = p * by_cum, column(w.f)
    e, past, g = w.e.astype(dtype), (weight * carry.s).astype(dtype), ahead.s.astype(dtype)
    narrow = u.astype(dtype)
    reads, pasts, keys, nexts, outs = [], [], [], [], []
    for h in group.heads:
        value, grad = values[:, group.columns(h)], grads[:, group.columns(h)]
        da = jnp.where(mask.pairs, dot(grad, value, NT, dtype), 0)
        da_t = jnp.where(mask.later, dot(value, grad, NT, dtype), 0)
        a_t = jnp.where(mask.later, dot(e, only_head(layout, u, h), NT, dtype), 0)
        reads.append(dot(da, e, NN, dtype))
        pasts.append(dot(grad, past, NT, dtype))
        keys.append(dot(da_t, narrow, NN, dtype))
        nexts.append(dot(value, g, NT, dtype))
        out = dot(a_t, grad, NN, dtype) + dot(only_head(layout, new.new, h), g, NN, dtype)
        outs.append(out.astype(dv.dtype))
    dv[:, group.values] = jnp.concatenate(outs, axis=1)
    reached = jnp.where(mask.seen, of_heads(layout, pasts), 0)
    dp = (of_heads(layout, reads) + reached) * by_cum
    each, dz = p * dp, u * dp
    dq[:, lanes] = (each - p * head_sums(layout, each)).astype(dq.dtype)
    here = w.e * (of_heads(layout, keys) - sums(mask.later, dz, dtype))
    dk[:, lanes] = (here + new.new * (of_heads(layout, nexts) + ahead.z)).astype(dk.dtype)
    through = per_head_rows(group, jnp.where(mask.seen, u, 0), grads)
    s = column(new.old) * ahead.s + weight * through
    z = new.old * ahead.z - w.f * jnp.sum(jnp.where(mask.seen, dz, 0), axis=0, keepdims=True)
    return Carry(ahead.m, z, s), w.exact


def _backward_kernel(
    layout: Layout,
    runs: Any,
    q: Any,
    k: Any,
    v: Any,
    dy: Any,
    rows: Any,
    s: Any,
    rows_ahead: Any,
    s_ahead: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    g_rows: Any,
    g_s: Any,
    *room: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        g_rows[...], g_s[...] = rows_ahead[...], s_ahead[...]

    mask = masks(layout, runs)
    exact = []
    for group in layout.groups():
        carry, ahead = read_carry(group, rows, s), read_carry(group, g_rows, g_s)
        refs, outs = (q, k, v, dy), (dq, dk, dv)
        before, good = _group_gradients(group, refs, outs, carry, ahead, mask)
        exact.append(good)
        write_carry(group, g_rows, g_s, before)
    steps = slow_steps(layout, exact)
    tmp, saved = room[:2], recurrence.Saved(*room[2:])

    @pl.when(steps > 0)
    def _() -> None:
        tmp[0][...], tmp[1][...] = rows[...], s[...]

    recurrence.walk(layout, steps, (q, k, v, runs), tmp, dy, dq, saved)

    @pl.when(steps > 0)
    def _() -> None:
        tmp[0][...], tmp[1][...] = jnp.zeros_like(tmp[0]), jnp.zeros_like(tmp[1])

    recurrence.walk_back(layout, steps, (v, dy), tmp, saved, (dk, dv))

    @pl.when(steps > 0)
    def _() -> None:
        g_rows[...] += tmp[0][...]
        g_s[...] += tmp[1][...]


def backward(
    layout: Layout,
    runs: Int[Array, "B 2 T"],
    tokens: tuple[Array, Array, Array, Array],
    states: tuple[Array, Array],
    ahead: tuple[Array, Array],
    interpret: Any,
) -> tuple[Array, ...]:
    """dq, dk, dv and the initial state's gradient (rows, s), whose row of m is zero.

    tokens: q, k, v and dy. states: before every chunk. ahead: the final state's gradient.
    """
    last = layout.chunks - 1
    wide, narrow = (token_spec(layout, x, last) for x in (layout.size, layout.latents))
    q, k, v, _ = tokens
    saved = pltpu.VMEM((layout.chunk, layout.block * layout.latents), jnp.float32)
    chunk_specs = _chunk_state_specs(layout, last)
    return pl.pallas_call(
        functools.partial(_backward_kernel, layout),
        grid=layout.grid,
        in_specs=[
            runs_spec(layout, last),
            *(narrow, narrow, wide, wide),
            *chunk_specs,
            *state_specs(layout),
        ],
        out_specs=[narrow, narrow, wide, *state_specs(layout)],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
            *state_shapes(layout),
        ],
        scratch_shapes=[*scratch(layout), *([saved] * 4)],
        compiler_params=parameters(),
        interpret=interpret,
        name="latte_backward",
    )(runs, *tokens, *states, *ahead)
