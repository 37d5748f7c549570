"""Latte token by token inside a Mosaic kernel, for chunks whose products would underflow.

Exact whatever the logits, and slow: a loop of no steps where the chunk is exact in products. Its
body is one token of one group. State and gradient are in float32 scratch, [block · N, D], and
[2, block · N] for the rows (m, z). The caller says how a token's weights over the latents are read
and what becomes of its results, because Latte has its own softmax and Macchiato shares one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from latte.ops.latte.tpu_chunk import Group, Layout, column

_ROWS = 16
"""Rows of the smallest tile that holds any type: one token is read and written through it."""


def _rows(t: Array) -> Any:
    return pl.ds(pl.multiple_of(t & -_ROWS, _ROWS), _ROWS)


def _tile(ref: Any, t: Array, lanes: Any) -> tuple[Array, Array]:
    tile = ref[_rows(t), lanes].astype(jnp.float32)
    return tile, jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0) == (t & (_ROWS - 1))


def read(ref: Any, t: Array, lanes: Any) -> Float[Array, "1 W"]:
    """Row t of a block, as float32."""
    tile, here = _tile(ref, t, lanes)
    return jnp.sum(jnp.where(here, tile, 0), axis=0, keepdims=True)


def write(ref: Any, t: Array, lanes: Any, row: Float[Array, "1 W"]) -> None:
    tile, here = _tile(ref, t, lanes)
    ref[_rows(t), lanes] = jnp.where(here, row, tile).astype(ref.dtype)


def add(ref: Any, t: Array, lanes: Any, row: Float[Array, "1 W"]) -> None:
    tile, here = _tile(ref, t, lanes)
    ref[_rows(t), lanes] = jnp.where(here, tile + row, tile).astype(ref.dtype)


def _first(runs: Any, t: Array) -> Array:
    """Whether token t is the first of its document, [1, 1]."""
    both = runs[:, :]
    here = jax.lax.broadcasted_iota(jnp.int32, both.shape, 1) == t
    run = jnp.sum(jnp.where(here, both, 0), axis=1, keepdims=True)
    return run[0:1] != run[1:2]


def _per_latent(group: Group, row: Float[Array, "1 V"]) -> Float[Array, "L D"]:
    """For each latent the values of its head."""
    shape = group.layout.latents, group.layout.size
    return jnp.concatenate(
        [jnp.broadcast_to(row[:, group.columns(h)], shape) for h in group.heads], axis=0
    )


def _per_value(group: Group, x: Float[Array, "L D"]) -> Float[Array, "1 V"]:
    """The sum over each head's latents."""
    return jnp.concatenate(
        [jnp.sum(x[group.rows(h)], axis=0, keepdims=True) for h in group.heads], axis=1
    )


def _across(x: Float[Array, "L D"]) -> Float[Array, "1 L"]:
    """The sum of each row, as a row of lanes."""
    total = jnp.sum(x, axis=1, keepdims=True)
    return jnp.broadcast_to(total, (x.shape[0], 8)).T[0:1]


def over_heads(
    layout: Layout, function: Callable[..., Array], row: Float[Array, "1 L"]
) -> Float[Array, "1 L"]:
    """softmax or head_sums of one row, in a tile: the matrix units take no single row."""
    return function(layout, jnp.broadcast_to(row, (8, row.shape[1])))[0:1]


def _loop(layout: Layout, steps: Array, body: Callable[[Array, Group], None]) -> None:
    """body(i, group) for i < steps, and each group of heads."""
    count = layout.block // layout.group

    def tokens(i: Array, _: None) -> None:
        if count == 1:
            body(i, Group(layout, 0))
        else:
            # A bound that is no constant keeps one group's code, not all of them, in the kernel.
            groups = jnp.where(steps > 0, count, 0)
            jax.lax.fori_loop(0, groups, lambda j, _: body(i, Group(layout, j)), None)

    jax.lax.fori_loop(0, steps, tokens, None)


Weights = Callable[[Array, Group], Array]
"""Token t's weights over a group's latents, [1, L]."""


class _Step(NamedTuple):
    """A token's rows of weights (of the past, of its value), p and the normaliser; and s."""

    old: Float[Array, "1 L"]
    new: Float[Array, "1 L"]
    p: Float[Array, "1 L"]
    z: Float[Array, "1 L"]
    s: Float[Array, "L D"]


def _step(group: Group, t: Array, weights: Weights, refs: Any, tmp: Any) -> _Step:
    """Token t enters the state in `tmp`: (rows, s)."""
    k, v, runs = refs
    rows, states = tmp
    lanes = group.latents
    key = read(k, t, lanes)
    before = jnp.where(_first(runs, t), -jnp.inf, rows[0:1, lanes])
    m = jnp.maximum(before, key)
    old, new = jnp.exp(before - m), jnp.exp(key - m)
    z = old * rows[1:2, lanes] + new
    value = _per_latent(group, read(v, t, group.values))
    s = column(old) * states[lanes, :] + column(new) * value
    rows[0:1, lanes], rows[1:2, lanes], states[lanes, :] = m, z, s
    return _Step(old, new, weights(t, group), z, s)


def outputs(
    layout: Layout,
    steps: Array,
    weights: Weights,
    refs: Any,
    tmp: Any,
    emit: Callable[[Array, Group, Array], None],
) -> None:
    """Emits y [1, V] of the first `steps` tokens; `tmp` holds the carried state, and is used up.

    `refs` are k, v and runs.
    """

    def body(t: Array, group: Group) -> None:
        step = _step(group, t, weights, refs, tmp)
        emit(t, group, _per_value(group, column(step.p / step.z) * step.s))

    _loop(layout, steps, body)


class Saved(NamedTuple):
    """Scratch [C, block · N] for what a walk forward leaves to the walk back."""

    old: Any
    new: Any
    u: Any
    dz: Any


def walk(
    layout: Layout,
    steps: Array,
    weights: Weights,
    refs: Any,
    tmp: Any,
    dy: Any,
    emit: Callable[[Array, Group, Array, Array], None],
    saved: Saved,
) -> None:
    """Emits p and p · dp of the first `steps` tokens and writes what `walk_back` needs.

    `refs` are k, v and runs; the state in `tmp` is used up.
    """

    def body(t: Array, group: Group) -> None:
        lanes = group.latents
        step = _step(group, t, weights, refs, tmp)
        dp = _across(step.s * _per_latent(group, read(dy, t, group.values))) / step.z
        emit(t, group, step.p, step.p * dp)
        u = step.p / step.z
        for ref, row in zip(saved, (step.old, step.new, u, u * dp), strict=False):
            write(ref, t, lanes, row)

    _loop(layout, steps, body)


def walk_back(
    layout: Layout, steps: Array, refs: Any, tmp: Any, saved: Saved, outs: Any, state: Any
) -> None:
    """Adds to dk and dv of the first `steps` tokens, and to the gradient of the carried state.

    `refs` are v and dy, `outs` dk and dv; `tmp` and `state` are rooms for (rows, s).
    """
    v, dy = refs
    dk, dv = outs
    rows, gradients = tmp

    @pl.when(steps > 0)
    def _() -> None:
        rows[...], gradients[...] = jnp.zeros_like(rows), jnp.zeros_like(gradients)

    def body(i: Array, group: Group) -> None:
        t, lanes = steps - 1 - i, group.latents
        old, new, u, dz = (read(ref, t, lanes) for ref in saved)
        g = gradients[lanes, :] + column(u) * _per_latent(group, read(dy, t, group.values))
        z = rows[1:2, lanes] - dz
        value = _per_latent(group, read(v, t, group.values))
        add(dv, t, group.values, _per_value(group, column(new) * g))
        add(dk, t, lanes, new * (_across(value * g) + z))
        gradients[lanes, :] = column(old) * g
        rows[1:2, lanes] = old * z

    _loop(layout, steps, body)

    @pl.when(steps > 0)
    def _() -> None:
        for total, part in zip(state, tmp, strict=True):
            total[...] += part[...]
