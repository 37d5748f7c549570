"""The backward pass of Latte on TPU: the chunks' states again, then the chunks from last to first.

With X_t = Σ_{s≤t} (dy_t·v_s) e_s + f dy_t·s, all under the chunk's largest logit, and G, g the
gradients of the next state's s and z:

    dp = X / cum,  dq = p (dp − Σ p dp),  u = p / cum
    dv = Aᵀ dy + new G
    dk = e (Σ_{t≥s} (dy_t·v_s) u_t − Σ_{t≥s} u_t dp_t) + new (v Gᵀ + g)
    G  ← old G + f uᵀ dy,  g ← old g − f Σ u dp
"""

import functools
from typing import Any, NamedTuple

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
    Update,
    Weights,
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
    weights_of_logits,
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


def chunk_state_specs(layout: Layout, last: int | None = None) -> list[pl.BlockSpec]:
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
        out_specs=chunk_state_specs(layout),
        out_shape=shapes,
        scratch_shapes=scratch(layout),
        compiler_params=parameters(),
        interpret=interpret,
        name="latte_states",
    )(runs, k, v, rows, s)


class Factors(NamedTuple):
    """What a group's gradients are made of. past, g: f s and G, rounded for products.

    by_cum: 1 / cum where products are exact and 0 where not; there only what the next state says
    is in the gradients.
    """

    weights: Weights
    new: Update
    by_cum: Float[Array, "C L"]
    u: Float[Array, "C L"]
    past: Float[Array, "L D"]
    g: Float[Array, "L D"]


def factors(
    group: Group,
    p: Float[Array, "C L"],
    k: Float[Array, "C L"],
    carry: Carry,
    ahead: Carry,
    mask: Masks,
) -> Factors:
    layout, dtype = group.layout, group.layout.dtype
    w, new = weigh(layout, k, carry, mask), update(k, carry.m, mask)
    by_cum = jnp.where(w.exact, inverse(w.cum), 0)
    past = (column(w.f) * carry.s).astype(dtype)
    return Factors(w, new, by_cum, p * by_cum, past, ahead.s.astype(dtype))


class OfHead(NamedTuple):
    """A head's products, before its lanes are taken out of them: parts of dp (from this chunk, from
    the past), of dk (from this chunk, for the next) and dv."""

    read: Float[Array, "C L"]
    past: Float[Array, "C L"]
    key: Float[Array, "C L"]
    next: Float[Array, "C L"]
    dv: Float[Array, "C D"]


def head_gradients(
    group: Group,
    h: int,
    f: Factors,
    value: Float[Array, "C D"],
    grad: Float[Array, "C D"],
    across: Float[Array, "C C"],
    mask: Masks,
    near: Float[Array, "C C"] | None = None,
) -> OfHead:
    """`across` is dy vᵀ; `near`, in rows of s, is added to the latents' weights of v."""
    layout, dtype = group.layout, group.layout.dtype
    e = f.weights.e.astype(dtype)
    da_t = jnp.where(mask.later, dot(value, grad, NT, dtype), 0)
    a_t = dot(e, only_head(layout, f.u, h), NT, dtype)
    a_t = jnp.where(mask.later, a_t if near is None else a_t + near, 0)
    return OfHead(
        dot(jnp.where(mask.pairs, across, 0), e, NN, dtype),
        dot(grad, f.past, NT, dtype),
        dot(da_t, f.u, NN, dtype),
        dot(value, f.g, NT, dtype),
        dot(a_t, grad, NN, dtype) + dot(only_head(layout, f.new.new, h), f.g, NN, dtype),
    )


def gather(
    group: Group,
    f: Factors,
    heads: list[OfHead],
    grads: Float[Array, "C V"],
    carry: Carry,
    ahead: Carry,
    mask: Masks,
) -> tuple[Float[Array, "C L"], Float[Array, "C L"], Carry]:
    """dp, dk and the carried state's gradient of a group, from its heads' products."""
    layout, w, new = group.layout, f.weights, f.new
    reached = jnp.where(mask.seen, of_heads(layout, [h.past for h in heads]), 0)
    dp = (of_heads(layout, [h.read for h in heads]) + reached) * f.by_cum
    dz = f.u * dp
    from_later = of_heads(layout, [h.key for h in heads]) - sums(mask.later, dz, layout.dtype)
    from_next = of_heads(layout, [h.next for h in heads]) + ahead.z
    dk = w.e * from_later + new.new * from_next
    through = per_head_rows(group, jnp.where(mask.seen, f.u, 0), grads)
    s = column(new.old) * ahead.s + column(w.f) * through
    z = new.old * ahead.z - w.f * jnp.sum(jnp.where(mask.seen, dz, 0), axis=0, keepdims=True)
    return dp, dk, Carry(ahead.m, z, s)


def _group_gradients(
    group: Group, refs: Any, gradients: Any, carry: Carry, ahead: Carry, mask: Masks
) -> tuple[Carry, Array]:
    """Writes dq, dk, dv of a group; the carried state's gradient, and if products are exact."""
    q, k, v, dy = refs
    dq, dk, dv = gradients
    layout, lanes, dtype = group.layout, group.latents, group.layout.dtype
    p = softmax(layout, q[:, lanes].astype(jnp.float32))
    f = factors(group, p, k[:, lanes].astype(jnp.float32), carry, ahead, mask)
    values, grads, heads = v[:, group.values], dy[:, group.values], []
    for h in group.heads:
        value, grad = values[:, group.columns(h)], grads[:, group.columns(h)]
        across = dot(grad, value, NT, dtype)
        heads.append(head_gradients(group, h, f, value, grad, across, mask))
    dv[:, group.values] = jnp.concatenate([h.dv.astype(dv.dtype) for h in heads], axis=1)
    dp, key, before = gather(group, f, heads, grads, carry, ahead, mask)
    each = p * dp
    dq[:, lanes] = (each - p * head_sums(layout, each)).astype(dq.dtype)
    dk[:, lanes] = key.astype(dk.dtype)
    return before, f.weights.exact


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

    def emit(t: Array, group: Group, p: Array, each: Array) -> None:
        total = recurrence.over_heads(layout, head_sums, each)
        recurrence.write(dq, t, group.latents, each - p * total)

    weights = weights_of_logits(layout, q)
    recurrence.walk(layout, steps, weights, (k, v, runs), tmp, dy, emit, saved)
    recurrence.walk_back(layout, steps, (v, dy), tmp, saved, (dk, dv), (g_rows, g_s))


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
    chunk_specs = chunk_state_specs(layout, last)
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
