"""The forward pass of Macchiato on TPU: one kernel, chunk after chunk, past and window in VMEM."""

import functools
from typing import Any, NamedTuple

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
    Masks,
    advance,
    column,
    dot,
    inverse,
    masks,
    only_head,
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
from latte.ops.macchiato import tpu_mixture
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
from latte.ops.macchiato.tpu_window import Sight, attend, sight, sum_products, unfold


class Slow(NamedTuple):
    """Scratch for chunks that the recurrence takes: a state, and 1 in the lanes of the groups of
    which products are not exact, 0 in those of the others."""

    state: State
    lanes: Any


def slow_room(plan: Plan) -> Slow:
    lanes = plan.latte.block * plan.latte.latents
    return Slow(State(*scratch(plan.latte)), pltpu.VMEM((1, lanes), jnp.float32))


def slow_weights(mixture: Any, slow: Slow) -> recurrence.Weights:
    """A token's weights, 0 for groups that need no recurrence: so it adds nothing to theirs."""

    def weights(t: Array, group: Group) -> Array:
        lanes = group.latents
        return recurrence.read(mixture, t, lanes) * slow.lanes[0:1, lanes]

    return weights


def mark(slow: Slow, group: Group, exact: Array) -> None:
    row = jnp.broadcast_to(exact, (1, group.layout.lanes))
    slow.lanes[0:1, group.latents] = jnp.where(row, 0.0, 1.0)


def mass(group: Group, window: Float[Array, "C b"], h: int) -> Float[Array, "C 1"]:
    """A head's p0."""
    lane = group.index * group.layout.group + h
    return window[:, lane : lane + 1]


def _group_outputs(
    plan: Plan,
    group: Group,
    mixture: Mixture,
    tokens: Tokens,
    past: list[Cache],
    carry: Carry,
    mask: Masks,
    seen: Sight,
) -> tuple[Array, Array]:
    """y of a group, and whether the latents' part is in it: it is not where it is not exact."""
    layout, dtype = group.layout, group.layout.dtype
    p, window = mixture
    w = weigh(layout, tokens.k[:, group.latents].astype(jnp.float32), carry, mask)
    u = p * jnp.where(w.exact, inverse(w.cum), 0)
    reads = jnp.where(mask.seen, u, 0)
    state, e, outs = (column(w.f) * carry.s).astype(dtype), w.e.astype(dtype), []
    nears, total = [], sum_products(plan)
    for h in group.heads:
        keys = keys_of(plan, group, h)
        before = [c.kw[:, keys] for c in past]
        near = attend(plan, seen, tokens.qw[:, keys], [tokens.kw[:, keys], *before], total)
        p0 = mass(group, window, h)
        nears.append(unfold(seen.own, [p0 * x for x in near.weights]))
    for h, (own, *before) in enumerate(nears):
        values = values_of(group, h)
        a = jnp.where(mask.pairs, dot(only_head(layout, u, h), e, NT, dtype) + own, 0)
        out = dot(a, tokens.v[:, values], NN, dtype)
        for weights, cache in zip(before, past, strict=True):
            out = out + dot(weights, cache.v[:, values], NN, dtype)
        outs.append(out + dot(only_head(layout, reads, h), state, NN, dtype))
    return jnp.concatenate(outs, axis=1), w.exact


def _kernel(
    plan: Plan,
    runs: Any,
    past_runs: tuple,
    tokens: Tokens,
    cache: Cache,
    before: State,
    y: Any,
    after: State,
    ring: Cache,
    mixture: Mixture,
    slow: Slow,
) -> None:
    layout, chunk = plan.latte, pl.program_id(2)
    (rows, s), given = after, cache_part(plan, cache)

    @pl.when(chunk == 0)
    def _() -> None:
        rows[...], s[...] = before.rows[...], before.s[...]
        copy(given, ring)

    slow.state.rows[...], slow.state.s[...] = rows[...], s[...]
    tpu_mixture.read(plan, tokens.q, mixture)
    mask, seen = masks(layout, runs), sight(plan, runs, past_runs)
    places = [place(plan, chunk, i + 1) for i in range(plan.before)]
    past = [Cache(*(x.at[where] for x in ring)) for where in places]
    window, exact = mixture.window[...], []
    for group in layout.groups():
        carry = read_carry(group, rows, s)
        weights = Mixture(mixture.latents[:, group.latents], window)
        out, good = _group_outputs(plan, group, weights, tokens, past, carry, mask, seen)
        y[:, group.values] = out.astype(y.dtype)
        mark(slow, group, good)
        exact.append(good)
        new = update(tokens.k[:, group.latents].astype(jnp.float32), carry.m, mask)
        write_carry(group, rows, s, advance(carry, new, group, tokens.v[:, group.values]))
    past[-1].kw[...], past[-1].v[...] = tokens.kw[...], tokens.v[...]

    def emit(t: Array, group: Group, row: Array) -> None:
        recurrence.add(y, t, group.values, row)

    weights = slow_weights(mixture.latents, slow)
    refs = tokens.k, tokens.v, runs
    recurrence.outputs(layout, slow_steps(layout, exact), weights, refs, slow.state, emit)


def forward(
    plan: Plan,
    runs: Int[Array, "B 2 T"],
    past_runs: Int[Array, "B 1 S"],
    tokens: Tokens,
    cache: Cache,
    before: State,
    interpret: Any,
) -> tuple[Array, State]:
    """y and the state after the last token. `past_runs` begin with those of `cache`."""
    layout = plan.latte
    where = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=layout.grid,
        in_specs=[
            runs_spec(layout),
            past_runs_specs(plan),
            token_specs(plan),
            Cache(where, where),
            State(*state_specs(layout)),
        ],
        out_specs=[token_spec(layout, layout.size), State(*state_specs(layout))],
        out_shape=[shapes(tokens.v), State(*state_shapes(layout))],
        scratch_shapes=[
            cache_room(plan, tokens.kw.dtype, tokens.v.dtype),
            tpu_mixture.room(plan),
            slow_room(plan),
        ],
        compiler_params=parameters(),
        interpret=interpret,
        name="macchiato_forward",
    )(runs, (past_runs,) * plan.before, tokens, cache, before)
