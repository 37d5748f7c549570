"""The forward pass of Latte on TPU: one kernel, chunk after chunk, the state in VMEM."""

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
    inverse,
    masks,
    only_head,
    softmax,
    update,
    weigh,
)


def token_spec(layout: Layout, width: int, last: int | None = None) -> pl.BlockSpec:
    """A chunk of a flat array [B, T, H · width]; with `last`, counted back from that chunk."""

    def index(b: Array, h: Array, c: Array) -> tuple:
        return b, c if last is None else last - c, h

    return pl.BlockSpec((None, layout.chunk, layout.block * width), index)


def runs_spec(layout: Layout, last: int | None = None) -> pl.BlockSpec:
    def index(b: Array, h: Array, c: Array) -> tuple:
        return b, 0, c if last is None else last - c

    return pl.BlockSpec((None, 2, layout.chunk), index)


def state_specs(layout: Layout) -> list[pl.BlockSpec]:
    """The rows (m, z) [B, 2, H · N] and s [B, H · N, D] of a block of heads."""
    width = layout.block * layout.latents
    return [
        pl.BlockSpec((None, 2, width), lambda b, h, c: (b, 0, h)),
        pl.BlockSpec((None, width, layout.size), lambda b, h, c: (b, h, 0)),
    ]


def state_shapes(layout: Layout) -> list[jax.ShapeDtypeStruct]:
    width = layout.heads * layout.latents
    return [
        jax.ShapeDtypeStruct((layout.batch, 2, width), jnp.float32),
        jax.ShapeDtypeStruct((layout.batch, width, layout.size), jnp.float32),
    ]


def scratch(layout: Layout) -> list[Any]:
    """Room for the state of a block, where the recurrence needs it."""
    width = layout.block * layout.latents
    return [pltpu.VMEM((2, width), jnp.float32), pltpu.VMEM((width, layout.size), jnp.float32)]


def parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def read_carry(group: Group, rows: Any, s: Any) -> Carry:
    lanes = group.latents
    return Carry(rows[0:1, lanes], rows[1:2, lanes], s[lanes, :])


def write_carry(group: Group, rows: Any, s: Any, carry: Carry) -> None:
    lanes = group.latents
    rows[0:1, lanes], rows[1:2, lanes], s[lanes, :] = carry


def slow_steps(layout: Layout, exact: list[Array]) -> Array:
    """Tokens that the recurrence must take: all of a chunk in which any group is not exact."""
    together = exact[0].astype(jnp.int32)
    for flag in exact[1:]:
        together = together * flag.astype(jnp.int32)
    return jnp.where(together[0, 0] > 0, 0, layout.chunk)


def _group_outputs(
    group: Group, q: Array, k: Array, v: Array, y: Any, carry: Carry, mask: Masks
) -> Array:
    """Writes y of a group and says whether it is exact."""
    layout, dtype = group.layout, group.layout.dtype
    weights = weigh(layout, k, carry, mask)
    u = softmax(layout, q.astype(jnp.float32)) * inverse(weights.cum)
    seen = jnp.where(mask.seen, u, 0)
    past = (column(weights.f) * carry.s).astype(dtype)
    e, outs = weights.e.astype(dtype), []
    for h in group.heads:
        a = jnp.where(mask.pairs, dot(only_head(layout, u, h), e, NT, dtype), 0)
        out = dot(a, v[:, group.columns(h)], NN, dtype)
        out = out + dot(only_head(layout, seen, h), past, NN, dtype)
        outs.append(out.astype(y.dtype))
    y[:, group.values] = jnp.concatenate(outs, axis=1)
    return weights.exact


def weights_of_logits(layout: Layout, q: Any) -> recurrence.Weights:
    """A token's softmax, for the recurrence."""

    def weights(t: Array, group: Group) -> Array:
        row = recurrence.read(q, t, group.latents)
        return recurrence.over_heads(layout, softmax, row)

    return weights


def _forward_kernel(
    layout: Layout,
    runs: Any,
    q: Any,
    k: Any,
    v: Any,
    rows_before: Any,
    s_before: Any,
    y: Any,
    rows: Any,
    s: Any,
    *tmp: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        rows[...], s[...] = rows_before[...], s_before[...]

    tmp[0][...], tmp[1][...] = rows[...], s[...]
    mask = masks(layout, runs)
    exact = []
    for group in layout.groups():
        carry = read_carry(group, rows, s)
        key = k[:, group.latents].astype(jnp.float32)
        value = v[:, group.values]
        exact.append(_group_outputs(group, q[:, group.latents], key, value, y, carry, mask))
        write_carry(group, rows, s, advance(carry, update(key, carry.m, mask), group, value))

    def emit(t: Array, group: Group, row: Array) -> None:
        recurrence.write(y, t, group.values, row)

    steps = slow_steps(layout, exact)
    recurrence.outputs(layout, steps, weights_of_logits(layout, q), (k, v, runs), tmp, emit)


def forward(
    layout: Layout,
    runs: Int[Array, "B 2 T"],
    q: Float[Array, "B T HN"],
    k: Float[Array, "B T HN"],
    v: Float[Array, "B T HD"],
    rows: Float[Array, "B 2 HN"],
    s: Float[Array, "B HN D"],
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """y and the state (rows, s) after the last token."""
    wide, narrow = token_spec(layout, layout.size), token_spec(layout, layout.latents)
    return pl.pallas_call(
        functools.partial(_forward_kernel, layout),
        grid=layout.grid,
        in_specs=[runs_spec(layout), narrow, narrow, wide, *state_specs(layout)],
        out_specs=[wide, *state_specs(layout)],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), *state_shapes(layout)],
        scratch_shapes=scratch(layout),
        compiler_params=parameters(),
        interpret=interpret,
        name="latte_forward",
    )(runs, q, k, v, rows, s)
