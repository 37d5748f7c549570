"""Latte on TPU: Pallas kernels, forward and backward, over the flat arrays that projections leave.

The forward kernel reads raw logits and goes over the chunks in order with the state in VMEM; the
backward pass computes the chunks' states again, and then walks the chunks from last to first. The
mathematics is that of `xla.py`; a chunk whose sums would underflow takes the token recurrence
inside the kernel, so every finite input is exact.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from latte.ops.latte.state import LatteState, step
from latte.ops.latte.tpu_backward import backward, chunk_states
from latte.ops.latte.tpu_chunk import Layout
from latte.ops.latte.tpu_forward import forward
from latte.ops.segments import Runs

_LANES = 128
_VMEM = {2: 12 * 2**20, 4: 8 * 2**20}
"""Bytes of blocks and scratch, by an item's: of the 16 MiB that a TPU's compiler grants a kernel,
the rest is for registers that spill, and the parts of a float32 product are many."""


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut a call up.

    chunk: tokens of a chunk; a multiple of 128 on a TPU, of 16 in an interpreter.
    heads: at most so many heads in one grid step: the more, the better the units of the chip are
        kept busy. There are fewer where their arrays would not fit into VMEM, and more where
        fewer do not fill whole lanes.
    """

    chunk: int = 128
    heads: int = 16


def _bytes_per_head(latents: int, size: int, chunk: int, item: int) -> int:
    """What the backward kernel, the larger one, keeps of a head in VMEM: blocks that come and go
    twice (one is computed on while another moves), scratch once."""
    tokens = 2 * (4 * latents + 3 * size) * item + 4 * latents * 4
    return chunk * tokens + 7 * latents * size * 4


def _layout(q: Array, v: Array, tiles: Tiles, interpret: Any) -> Layout:
    batch, length, heads, latents = q.shape
    size = v.shape[-1]
    unit = 16 if interpret else _LANES
    if tiles.chunk < 1 or tiles.chunk % unit:
        raise ValueError(f"latte: a chunk of {tiles.chunk} tokens is not a multiple of {unit}")
    dtypes = [x.dtype for x in (q, v) if x.dtype not in (jnp.bfloat16, jnp.float32)]
    if dtypes:
        raise ValueError(f"latte: TPU kernels compute in bfloat16 or float32, not {dtypes[0]}")
    if not interpret and (size == 1 or heads * latents == 1):
        raise ValueError("latte: TPU kernels have no form for one latent in all, or for one value")
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    whole = [n for n in divisors if not (n * latents % _LANES or n * size % _LANES)]
    group = whole[0] if whole else heads
    each = _bytes_per_head(latents, size, tiles.chunk, v.dtype.itemsize)
    room = _VMEM[v.dtype.itemsize]
    # Heads that share lanes are computed side by side, and what is spilled comes on top.
    if not interpret and 4 * group * each > 3 * room:
        raise ValueError(
            f"latte: {group} heads of {latents} latents and {size} values share lanes and do not "
            "fit into VMEM: choose sizes of which fewer heads fill a multiple of 128 lanes"
        )
    most = min(tiles.heads, room // each)
    block = max([n for n in divisors if n <= most and n % group == 0], default=group)
    padded = length + -length % tiles.chunk
    return Layout(
        batch, padded, heads, latents, size, tiles.chunk, group, block, jnp.dtype(v.dtype)
    )


def _run_rows(run: Array, layout: Layout) -> Array:
    """Each token's run number and that of the token before it (0 before the first), [B, 2, T]."""
    run = jnp.pad(run, ((0, 0), (0, layout.length - run.shape[1])), mode="edge")
    before = jnp.pad(run[:, :-1], ((0, 0), (1, 0)))
    return jnp.stack([run, before], axis=1)


def _flat(x: Array, layout: Layout, fill: float = 0.0) -> Array:
    """[B, T, H, X] as [B, T, H · X], filled up to whole chunks."""
    x = x.reshape(*x.shape[:2], -1)
    missing = layout.length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0)), constant_values=fill) if missing else x


def _tokens(q: Array, k: Array, v: Array, layout: Layout) -> tuple[Array, Array, Array]:
    # A logit of −∞ has no weight.
    return _flat(q, layout), _flat(k, layout, -jnp.inf), _flat(v, layout)


def carried(m: Array, l: Array, s: Array) -> tuple[Array, Array]:
    """The kernels' form of a state: rows (m, z) [B, 2, H · N] and z · s [B, H · N, D]."""
    z = jnp.exp(l)
    rows = jnp.stack([x.reshape(x.shape[0], -1) for x in (m, z)], axis=1)
    return rows, (z[..., None] * s).reshape(s.shape[0], -1, s.shape[-1])


def state_of(rows: Array, s: Array, layout: Layout) -> tuple[Array, Array, Array]:
    """The inverse of `carried`."""
    m, z = (rows[:, i].reshape(layout.batch, layout.heads, layout.latents) for i in (0, 1))
    return m, jnp.log(z), s.reshape(*z.shape, -1) / z[..., None]


def carried_gradient(l: Array, s: Array, dl: Array, ds: Array) -> tuple[Array, Array]:
    """The gradient of the kernels' form of a final state: l = log z and s = (z s) / z."""
    inverse = jnp.exp(-l)
    dz = (dl - jnp.sum(s * ds, axis=3)) * inverse
    rows = jnp.stack([jnp.zeros_like(dz), dz], axis=1).reshape(dz.shape[0], 2, -1)
    return rows, (inverse[..., None] * ds).reshape(s.shape[0], -1, s.shape[-1])


def state_gradient(
    g_rows: Array, g: Array, m: Array, l: Array, s: Array
) -> tuple[Array, Array, Array]:
    """The gradient of a state from that of the kernels' form of it; m has none."""
    dz, g, z = g_rows[:, 1].reshape(l.shape), g.reshape(s.shape), jnp.exp(l)
    return jnp.zeros_like(m), z * (dz + jnp.sum(s * g, axis=3)), z[..., None] * g


def _mix(settings: tuple, q: Array, k: Array, v: Array, run: Array, m: Array, l: Array, s: Array):
    layout, interpret = settings
    tokens, runs = _tokens(q, k, v, layout), _run_rows(run, layout)
    y, rows, after = forward(layout, runs, *tokens, *carried(m, l, s), interpret)
    return y[:, : q.shape[1]].reshape(v.shape), *state_of(rows, after, layout)


def _mix_forward(settings: tuple, *args: Array) -> tuple:
    out = _mix(settings, *args)
    return out, (args, out[2:])


def _mix_backward(settings: tuple, saved: tuple, cotangent: tuple) -> tuple:
    layout, interpret = settings
    (q, k, v, run, m, l, s), (l_after, s_after) = saved
    dy, _, dl, ds = cotangent
    tokens, runs = _tokens(q, k, v, layout), _run_rows(run, layout)
    rows, before = carried(m, l, s)
    states = chunk_states(layout, runs, *tokens[1:], rows, before, interpret)
    ahead = carried_gradient(l_after, s_after, dl, ds)
    tokens = *tokens, _flat(dy, layout)
    *grads, g_rows, g = backward(layout, runs, tokens, states, ahead, interpret)
    dq, dk, dv = (
        x[:, : q.shape[1]].reshape(y.shape) for x, y in zip(grads, (q, k, v), strict=True)
    )
    return dq, dk, dv, None, *state_gradient(g_rows, g, m, l, s)


_mixed = jax.custom_vjp(_mix, nondiff_argnums=(0,))
_mixed.defvjp(_mix_forward, _mix_backward)


def latte(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    runs: Runs,
    state: LatteState,
    *,
    tiles: Tiles = Tiles(),
    interpret: Any = False,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    """`latte.ops.latte.latte` in one kernel; bfloat16 or float32, with a float32 state.

    Args:
        tiles: how the kernels cut the call up.
        interpret: False, True, or `pltpu.InterpretParams` to run without a TPU.

    Raises:
        ValueError: a type or a chunk that the kernels do not have.
    """
    layout = _layout(q, v, tiles, interpret)
    if q.shape[1] == 1:
        return _one(q, k, v, runs, state)
    m = jax.lax.stop_gradient(state.m)
    y, m, l, s = _mixed((layout, interpret), q, k, v, runs.run, m, state.l, state.s)
    return y, LatteState(jax.lax.stop_gradient(m), l, s, runs.last)


def _one(q: Array, k: Array, v: Array, runs: Runs, state: LatteState) -> tuple[Array, LatteState]:
    """One token needs no chunk: generation runs the recurrence itself."""
    p = jax.nn.softmax(q[:, 0].astype(jnp.float32), axis=-1)
    token = k[:, 0].astype(jnp.float32), v[:, 0].astype(jnp.float32), runs.first[:, 0]
    state, y = step(state, p, *token)
    return y[:, None].astype(v.dtype), state._replace(segment=runs.last)
