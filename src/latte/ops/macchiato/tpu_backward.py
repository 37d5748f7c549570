"""The backward pass of Macchiato on TPU: the chunks from last to first.

A window's part adds p0 Pᵀ dy to the gradients of its values, and with D = dy vᵀ:

    d p0 = Σ_s P_ts D_ts,  X = p0 P (D − d p0) scale,  dqw = X kw,  dkw = Xᵀ qw

What a chunk gives to the keys and values of those before it is kept in VMEM until they have their
turn; what it gives to those before the first is the gradient of the cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from latte.ops.latte import tpu_recurrence as recurrence
from latte.ops.latte.tpu_backward import chunk_state_specs, factors, gather, head_gradients
from latte.ops.latte.tpu_chunk import NN, NT, Carry, Group, Masks, dot, masks
from latte.ops.latte.tpu_forward import (
    parameters,
    read_carry,
    runs_spec,
    slow_steps,
    state_shapes,
    state_specs,
    write_carry,
)
from latte.ops.macchiato import tpu_mixture
from latte.ops.macchiato.tpu_forward import Slow, mark, mass, slow_room, slow_weights
from latte.ops.macchiato.tpu_layout import (
    Cache,
    Plan,
    State,
    Tokens,
    cache_part,
    cache_room,
    copy,
    keys_of,
    past_runs_specs,
    place,
    shapes,
    token_specs,
    values_of,
)
from latte.ops.macchiato.tpu_mixture import Mixture
from latte.ops.macchiato.tpu_window import Sight, added, attend, fold, pull, sight, unfold


class OfWindow(NamedTuple):
    """A head's gradients through its window: of p0, of its queries, and of the keys and values of
    its own chunk (of values, weights in rows of s instead) and of those before."""

    mass: Float[Array, "C 1"]
    q: Float[Array, "C K"]
    k: Float[Array, "C K"]
    weights: Float[Array, "C C"]
    before: list[Cache]


def _window_gradients(
    plan: Plan,
    seen: Sight,
    p0: Float[Array, "C 1"],
    q: Float[Array, "C K"],
    keys: list[Float[Array, "C K"]],
    grad: Float[Array, "C D"],
    across: list[Float[Array, "C C"]],
) -> OfWindow:
    """`across` is dy vᵀ; keys and it are of the own chunk, the one before it, …"""
    dtype = plan.latte.dtype
    near = attend(plan, seen, q, keys)
    change, products = pull(plan, near, p0, fold(seen.own, across))
    parts = zip(unfold(seen.own, products), keys, strict=True)
    dq = added(dot(x, k, NN, dtype) for x, k in parts)
    turned = unfold(seen.turned, [x.T for x in products])
    own, *before = (dot(x, q, NN, dtype) for x in turned)
    weights, *others = unfold(seen.turned, [(p0 * x).T for x in near.weights])
    values = [dot(x, grad, NN, dtype) for x in others]
    caches = [Cache(*pair) for pair in zip(before, values, strict=True)]
    return OfWindow(change, dq, own, weights, caches)


class _Group(NamedTuple):
    """Gradients of a group; `each` is p dp of its latents and its windows. exact: whether products
    are, without which the latents' part of the chunk is not in them."""

    each: Mixture
    tokens: Tokens
    before: list[Cache]
    carry: Carry
    exact: Array


def _group_gradients(
    plan: Plan,
    group: Group,
    mixture: Mixture,
    tokens: Tokens,
    dy: Any,
    past: list[Cache],
    carries: tuple[Carry, Carry],
    mask: Masks,
    seen: Sight,
) -> _Group:
    """`past` reads lanes of the chunks before; `carries`: the state, and the next's gradient."""
    dtype = plan.latte.dtype
    p, window = mixture
    f = factors(group, p, tokens.k[:, group.latents].astype(jnp.float32), *carries, mask)
    windows, latents = [], []
    for h in group.heads:
        at_k, at_v = keys_of(plan, group, h), values_of(group, h)
        keys = [tokens.kw[:, at_k], *(c.kw(at_k) for c in past)]
        values = [tokens.v[:, at_v], *(c.v(at_v) for c in past)]
        q, grad, p0 = tokens.qw[:, at_k], dy[:, at_v], mass(group, window, h)
        across = [dot(grad, v, NT, dtype) for v in values]
        near = _window_gradients(plan, seen, p0, q, keys, grad, across)
        windows.append(near)
        latents.append(head_gradients(group, h, f, values[0], grad, across[0], mask, near.weights))
    dp, dk, before = gather(group, f, latents, dy[:, group.values], *carries, mask)
    masses = [mass(group, window, h) * x.mass for h, x in enumerate(windows)]
    beside = functools.partial(jnp.concatenate, axis=1)
    wide = beside([x.q for x in windows]), beside([x.k for x in windows])
    caches = [
        Cache(*(beside(list(x)) for x in zip(*heads, strict=True)))
        for heads in zip(*(x.before for x in windows), strict=True)
    ]
    out = Tokens(None, dk, beside([x.dv for x in latents]), *wide)
    return _Group(Mixture(p * dp, masses), out, caches, before, f.weights.exact)


class _Room(NamedTuple):
    """Scratch. near: what later chunks give to the keys and values of those before them."""

    near: Cache
    mixture: Mixture
    each: Mixture
    slow: Slow
    saved: recurrence.Saved


def _write(
    plan: Plan, group: Group, chunk: Array, out: _Group, grads: Tokens, near: Cache, each: Any
) -> None:
    """Puts a group's gradients where they belong; those for chunks before this one add up."""
    first, last = (keys_of(plan, group, h) for h in (0, plan.latte.group - 1))
    at_k, at_v = slice(first.start, last.stop), group.values
    each[:, group.latents] = out.each.latents
    own = place(plan, chunk, 0)
    dv, dkw = out.tokens.v + near.v[own, at_v], out.tokens.kw + near.kw[own, at_k]
    pairs = (group.latents, out.tokens.k), (at_v, dv), (at_k, out.tokens.qw), (at_k, dkw)
    for ref, (lanes, x) in zip(grads[1:], pairs, strict=True):
        ref[:, lanes] = x.astype(ref.dtype)
    for back, part in enumerate(out.before, 1):
        at = place(plan, chunk, back)
        for ref, lanes, x in zip(near, (at_k, at_v), part, strict=True):
            # The farthest takes the place of this chunk, whose turn it was.
            ref[at, lanes] = x if back == plan.before else ref[at, lanes] + x


def _kernel(
    plan: Plan,
    runs: Any,
    past_runs: tuple,
    tokens: Tokens,
    dy: Any,
    past: tuple[Cache, ...],
    cache: Cache,
    state: State,
    ahead: State,
    grads: Tokens,
    cache_grads: Cache,
    g: State,
    room: _Room,
) -> None:
    layout, near, mixture, each = plan.latte, room.near, room.mixture, room.each
    chunk, leaving = layout.chunks - 1 - pl.program_id(2), cache_part(plan, cache_grads)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        g.rows[...], g.s[...] = ahead.rows[...], ahead.s[...]
        near.kw[...], near.v[...] = jnp.zeros_like(near.kw), jnp.zeros_like(near.v)

    tpu_mixture.read(plan, tokens.q, mixture)

    def lanes_before(back: int) -> Cache:
        at, outside = place(plan, chunk, back), chunk < back

        def lanes_of(cached: Any, ref: Any) -> Any:
            return lambda lanes: jax.lax.select(outside, cached[at, lanes], ref[:, lanes])

        return Cache(*(lanes_of(*pair) for pair in zip(cache, past[back - 1], strict=True)))

    mask, seen = masks(layout, runs), sight(plan, runs, past_runs)
    older = [lanes_before(i + 1) for i in range(plan.before)]
    window, masses, exact = mixture.window[...], [], []
    for group in layout.groups():
        carries = read_carry(group, state.rows, state.s), read_carry(group, g.rows, g.s)
        weights = Mixture(mixture.latents[:, group.latents], window)
        out = _group_gradients(plan, group, weights, tokens, dy, older, carries, mask, seen)
        _write(plan, group, chunk, out, grads, near, each.latents)
        masses += out.each.window
        mark(room.slow, group, out.exact)
        exact.append(out.exact)
        write_carry(group, g.rows, g.s, out.carry)
    each.window[...] = jnp.concatenate(masses, axis=1)
    _recur(plan, slow_steps(layout, exact), runs, tokens, dy, state, grads, g, room)
    tpu_mixture.write_gradients(plan, tokens.q, each, grads.q)

    @pl.when(chunk == 0)
    def _() -> None:
        copy(near, leaving)


def _recur(
    plan: Plan,
    steps: Array,
    runs: Any,
    tokens: Tokens,
    dy: Any,
    state: State,
    grads: Tokens,
    g: State,
    room: _Room,
) -> None:
    """The latents' part of a chunk whose products are not exact."""
    layout, tmp = plan.latte, room.slow.state

    @pl.when(steps > 0)
    def _() -> None:
        tmp.rows[...], tmp.s[...] = state.rows[...], state.s[...]

    def emit(t: Array, group: Group, p: Array, row: Array) -> None:
        del p
        recurrence.add(room.each.latents, t, group.latents, row)

    weights = slow_weights(room.mixture.latents, room.slow)
    refs = tokens.k, tokens.v, runs
    recurrence.walk(layout, steps, weights, refs, tmp, dy, emit, room.saved)
    outs = grads.k, grads.v
    recurrence.walk_back(layout, steps, (tokens.v, dy), tmp, room.saved, outs, g)


def backward(
    plan: Plan,
    runs: Int[Array, "B 2 T"],
    past_runs: Int[Array, "B 1 S"],
    tokens: Tokens,
    dy: Float[Array, "B T HD"],
    cache: Cache,
    states: tuple[Array, Array],
    ahead: State,
    interpret: Any,
) -> tuple[Tokens, Cache, State]:
    """Gradients of the tokens, of the cache and of the initial state, whose row of m is zero.

    states: before every chunk. ahead: the final state's gradient.
    """
    layout, last = plan.latte, plan.latte.chunks - 1
    specs = token_specs(plan, last)

    def block(back: int, width: int) -> pl.BlockSpec:
        def index(b: Array, h: Array, c: Array) -> tuple:
            return b, jnp.maximum(last - c - back, 0), h

        return pl.BlockSpec((None, layout.chunk, layout.block * width), index)

    def before(width: int) -> pl.BlockSpec:
        shape = None, plan.before * layout.chunk, layout.block * width
        return pl.BlockSpec(shape, lambda b, h, c: (b, 0, h))

    widths = plan.key_size, layout.size
    where = pl.BlockSpec(memory_space=pl.ANY)
    narrow = pltpu.VMEM((layout.chunk, layout.block * layout.latents), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=layout.grid,
        in_specs=[
            runs_spec(layout, last),
            past_runs_specs(plan, last),
            specs,
            specs.v,
            tuple(Cache(*(block(i + 1, x) for x in widths)) for i in range(plan.before)),
            Cache(*map(before, widths)),
            State(*chunk_state_specs(layout, last)),
            State(*state_specs(layout)),
        ],
        out_specs=[specs, Cache(where, where), State(*state_specs(layout))],
        out_shape=[shapes(tokens), shapes(cache, jnp.float32), State(*state_shapes(layout))],
        scratch_shapes=[
            _Room(
                cache_room(plan, jnp.float32, jnp.float32),
                tpu_mixture.room(plan),
                tpu_mixture.room(plan),
                slow_room(plan),
                recurrence.Saved(*[narrow] * 4),
            )
        ],
        compiler_params=parameters(),
        interpret=interpret,
        name="macchiato_backward",
    )(
        runs,
        (past_runs,) * plan.before,
        tokens,
        dy,
        (Cache(tokens.kw, tokens.v),) * plan.before,
        cache,
        State(*states),
        ahead,
    )
