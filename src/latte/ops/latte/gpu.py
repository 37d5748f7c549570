"""Latte on GPUs: Pallas kernels through Triton, from raw logits, forward and backward.

Where a gradient will be asked for, the forward pass keeps the state before each chunk, in the type
of v: N·D/C numbers a token and head, as many as v has where C = N. To make them again would read k
and v once more and run two more kernels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from latte.ops.kept import keep
from latte.ops.latte.gpu_backward import backward
from latte.ops.latte.gpu_block import Shape, Tiles
from latte.ops.latte.gpu_forward import forward
from latte.ops.latte.state import LatteState
from latte.ops.segments import Runs

__all__ = ["Tiles", "latte"]

_TILES = Tiles()
_WIDE_TILES = Tiles(chunk=32, output_warps=8, query_warps=8, key_warps=8)
"""For float32, whose products run without matrix units and take more registers."""


def _shape(k: Array, v: Array, tiles: Tiles) -> Shape:
    batch, length, heads, latents = k.shape
    chunk = min(tiles.chunk, max(16, pl.next_power_of_2(length)))
    return Shape(batch, length, heads, latents, v.shape[-1], chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _latte(tiles: Tiles, interpret: bool, arrays: tuple, state: tuple) -> tuple:
    shape = _shape(arrays[1], arrays[2], tiles)
    return forward(arrays, state, shape, tiles, False, interpret)[:2]


def _latte_forward(tiles: Tiles, interpret: bool, arrays: tuple, state: tuple) -> tuple:
    shape = _shape(arrays[1], arrays[2], tiles)
    y, after, kept = keep(forward(arrays, state, shape, tiles, True, interpret))
    return (y, after), (arrays, kept, state[2], after[2])


def _latte_backward(tiles: Tiles, interpret: bool, saved: tuple, cotangents: tuple) -> tuple:
    arrays, kept, s_first, s_last = saved
    dy, (_, dl, ds) = cotangents
    shape = _shape(arrays[1], arrays[2], tiles)
    dq, dk, dv, dl, ds = backward(
        arrays, kept, (s_first, s_last), (dy, dl, ds), shape, tiles, interpret
    )
    # m is a point of reference: l carries the gradient of both.
    return (dq, dk, dv, None), (jnp.zeros_like(dl), dl, ds)


_latte.defvjp(_latte_forward, _latte_backward)


def latte(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    runs: Runs,
    state: LatteState,
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    """`latte.ops.latte.latte` in kernels, for bfloat16 and float32; the state is float32.

    float32 operands are multiplied in full. `interpret` runs the kernels on anything, slowly.
    """
    if tiles is None:
        tiles = _WIDE_TILES if v.dtype == jnp.float32 else _TILES
    out: Any = _latte(tiles, interpret, (q, k, v, runs.run), tuple(state[:3]))
    y, (m, l, s) = out
    return y, LatteState(jax.lax.stop_gradient(m), l, s, runs.last)
