"""Attention on TPUs: JAX's splash attention, which skips blocks that a window does not reach.

Splash wants heads before time, lengths that its blocks divide, and queries that are scaled already;
documents are its segment ids. What fills up a row is one more document, in which each filling query
sees a filling key, so that no softmax is empty.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from latte.ops.attention.scores import Score, Window

_LANES = 128

_HIDDEN = -2
"""Run number of what fills up a row: no token has it."""


@dataclass(frozen=True)
class Blocks:
    """Tokens that a kernel holds at a time, multiples of 128; fewer where a row has fewer."""

    queries: int = 512
    keys: int = 512


class _Settings(NamedTuple):
    """past: keys before the first query's own. interpret: what `pallas_call` takes by that name."""

    window: Window
    score: Score
    past: int
    blocks: Blocks
    interpret: Any


def _round_up(length: int, block: int) -> int:
    return length + -length % block


@lru_cache
def _kernel(heads: int, queries: int, keys: int, settings: _Settings) -> Any:
    """Splash attention for lengths that are whole blocks.

    Finding the blocks that a window reaches takes the host a while, and its answer serves all
    layers: it is kept, as arrays of the host, which belong to no trace.
    """
    shape, window = (queries, keys), settings.window
    mask = (
        splash.FullMask(shape)
        if window == Window(None, None)
        else splash.LocalMask(shape, (window.left, window.right), offset=settings.past)
    )
    q, k = settings.blocks.queries, settings.blocks.keys
    sizes = splash.BlockSizes(
        block_q=q,
        block_kv=k,
        block_q_dkv=q,
        block_kv_dkv=k,
        block_q_dq=q,
        block_kv_dq=k,
    )
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=settings.score.softcap,
            interpret=settings.interpret,
        )
        return jax.device_get(kernel)


def _products(dtype: jnp.dtype) -> AbstractContextManager:
    """float32 operands are multiplied in full; splash itself asks for the matrix units' default."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def _run(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    run_q: Int[Array, "B T"],
    run_k: Int[Array, "B S"],
    settings: _Settings,
) -> Float[Array, "B T H D"]:
    length, blocks = q.shape[1], settings.blocks
    queries = _round_up(length, blocks.queries)
    # No fewer keys are added than queries, so that each of those has its own to see.
    keys = _round_up(k.shape[1] + queries - length, blocks.keys)

    def fill(x: Array, size: int, value: int = 0) -> Array:
        pads = [(0, 0)] * x.ndim
        pads[1] = (0, size - x.shape[1])
        return jnp.pad(x, pads, constant_values=value)

    scaled = (q.astype(jnp.float32) * settings.score.scale).astype(v.dtype)
    arrays = fill(scaled, queries), fill(k.astype(v.dtype), keys), fill(v, keys)
    runs = splash.SegmentIds(fill(run_q, queries, _HIDDEN), fill(run_k, keys, _HIDDEN))
    kernel = _kernel(q.shape[2], queries, keys, settings)
    y = jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in arrays), runs)
    return jnp.swapaxes(y, 1, 2)[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, settings: _Settings
) -> Array:
    with _products(v.dtype):
        return _run(q, k, v, run_q, run_k, settings)


def _attention_forward(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, settings: _Settings
) -> tuple[Array, Any]:
    with _products(v.dtype):
        return jax.vjp(lambda q, k, v: _run(q, k, v, run_q, run_k, settings), q, k, v)


def _attention_backward(settings: _Settings, pull_back: Any, dy: Array) -> tuple:
    del settings
    with _products(dy.dtype):
        return *pull_back(dy), None, None


_attention.defvjp(_attention_forward, _attention_backward)


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    run_q: Int[Array, "B T"],
    run_k: Int[Array, "B S"],
    window: Window,
    score: Score,
    *,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> Float[Array, "B T H D"]:
    """`latte.ops.attention.attention` by splash; the last T of the S keys are the queries' own.

    Queries are scaled before their products, in v's type: exact where the scale is a power of two.

    Args:
        blocks: tokens that the kernels hold at a time.
        interpret: True, or Pallas' `InterpretParams`, to run them on any machine.
    """
    blocks = Blocks() if blocks is None else blocks
    blocks = Blocks(
        min(blocks.queries, _round_up(q.shape[1], _LANES)),
        min(blocks.keys, _round_up(k.shape[1], _LANES)),
    )
    settings = _Settings(window, score, k.shape[1] - q.shape[1], blocks, interpret)
    return _attention(q, k, v, run_q, run_k, settings)
