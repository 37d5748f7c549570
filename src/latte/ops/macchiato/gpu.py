"""Latte-Macchiato on GPUs: one set of Pallas kernels, through Triton, for window and latents.

As the two parts of a token's weights among its own chunk are added before they meet v, and all is
read where it lies, a call costs hardly more than the dearer of its parts. The backward pass keeps
the states before each chunk, in the type of v, and two numbers of the window a token and head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from latte.ops.attention.gpu_block import Plan
from latte.ops.attention.scores import Score, Window
from latte.ops.kept import keep
from latte.ops.latte.gpu_block import Shape
from latte.ops.latte.state import LatteState
from latte.ops.macchiato.gpu_backward import backward
from latte.ops.macchiato.gpu_block import Call, Tiles
from latte.ops.macchiato.gpu_forward import Arrays, forward
from latte.ops.segments import EMPTY, Runs

__all__ = ["Tiles", "macchiato"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _macchiato(call: Call, arrays: Arrays, state: tuple) -> tuple:
    return forward(arrays, state, call)[:2]


def _macchiato_forward(call: Call, arrays: Arrays, state: tuple) -> tuple:
    y, after, kept = keep(forward(arrays, state, call))
    return (y, after), (arrays, kept, state[2], after[2])


def _macchiato_backward(call: Call, saved: tuple, cotangents: tuple) -> tuple:
    arrays, kept, *ends = saved
    dy, (_, dl, ds) = cotangents
    grads, (dl, ds) = backward(arrays, kept, (ends[0], ends[1]), (dy, dl, ds), call)
    # m is a point of reference: l carries the gradient of both.
    return grads, (jnp.zeros_like(dl), dl, ds)


_macchiato.defvjp(_macchiato_forward, _macchiato_backward)


def _before(x: Array, count: int, fill: int = 0) -> Array:
    """x [B, S, …] after `count` tokens more."""
    widths = [(0, 0), (count, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill)


def macchiato(
    q: Float[Array, "B T H L"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B S G D"],
    qw: Float[Array, "B T H K"],
    kw: Float[Array, "B S G K"],
    runs: Runs,
    run_past: Int[Array, "B S"],
    state: LatteState,
    window: int,
    score: Score,
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    """`latte.ops.macchiato.macchiato` in kernels, for bfloat16 and float32; the state is float32.

    Args:
        v, kw, run_past: of which the last T are the call's own tokens, others those of the past.
        tiles: how the kernels cut their work; by head size and type where None.
        interpret: run them as plain JAX, on any machine.

    Raises:
        ValueError: the scale or the soft cap is not above 0, or an array is too large to be
            addressed by 32 bits.
    """
    if score.scale <= 0 or (score.softcap is not None and score.softcap <= 0):
        raise ValueError(f"the kernels need a scale and a soft cap above 0, not {score}")
    if max(x.size for x in (q, k, v, qw, kw)) >= 2**31:
        raise ValueError("the kernels count entries of an array in 32 bits: split the batch")
    if tiles is None:
        tiles = Tiles.of(max(qw.shape[3], v.shape[3]), v.dtype)
    (batch, length, heads, latents), (keys, kv_heads, size) = k.shape, v.shape[1:]
    chunk, share = min(tiles.chunk, max(16, pl.next_power_of_2(length))), heads // kv_heads
    shape = Shape(batch, length, heads, latents, size, chunk, share)
    past = keys - length
    # Its gradient comes with that of v.
    own, fill = jax.lax.stop_gradient(v[:, past:]), -past % chunk
    v, kw, run_past = _before(v, fill), _before(kw, fill), _before(run_past, fill, EMPTY)
    past += fill
    plan = Plan(
        Window.of(window),
        score,
        past=past,
        queries=length,
        keys=past + length,
        key_size=kw.shape[3],
        size=size,
        share=share,
        dtype=v.dtype,
    )
    call = Call(shape, plan, window, tiles, interpret)
    qw, kw = qw.astype(v.dtype), kw.astype(v.dtype)
    arrays = Arrays(q, k, own, runs.run, run_past, qw, kw, v)
    out: Any = _macchiato(call, arrays, tuple(state[:3]))
    y, (m, l, s) = out
    return y, LatteState(jax.lax.stop_gradient(m), l, s, runs.last)
