"""Attention on GPUs: flash kernels for packed documents.

Forward, over blocks of keys, with a query's running maximum m and sum ℓ in float32:

    m' = max(m, max_s z_ts),  ℓ' = e^(m − m') ℓ + Σ_s e^(z_ts − m')
    u' = e^(m − m') u + Σ_s e^(z_ts − m') v_s,  and y = u / ℓ after the last

Backward, from p_ts = e^((z_ts − m_t) − log ℓ_t) and δ_t = dy_t · y_t:

    dz_ts = p_ts (dy_t · v_s − δ_t),  dv_s = Σ_t p_ts dy_t
    dq_t = Σ_s z'_ts dz_ts k_s,  dk_s = Σ_t z'_ts dz_ts q_t

with z' = scale (1 − tanh²) under a soft cap. One kernel owns blocks of queries (dq), another blocks
of keys (dk and dv, over all query heads that share them), so that no sums meet in memory. m and
log ℓ are kept apart: their sum would round away what logits of 1e4 differ by.

A program visits those blocks only that its window reaches and whose documents overlap its own.
Arrays are read where they lie, [B, T, H, ·]; head sizes that are no power of two are filled up on
the chip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from latte.ops.attention.gpu_block import (
    Plan,
    load_rows,
    padded,
    store_numbers,
    store_rows,
    tokens,
)
from latte.ops.attention.gpu_reach import Side, bounds
from latte.ops.attention.scores import Score, Window
from latte.ops.kept import keep


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: tokens that a program owns, tokens that it visits at a time."""

    own: int
    visit: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """A tile for each kernel: y and dq own queries, dk and dv own keys."""

    y: Tile
    dq: Tile
    dkv: Tile

    @classmethod
    def of(cls, size: int, dtype: jnp.dtype) -> "Tiles":
        """Tiles that fit an H100's or H200's registers for heads of up to `size` channels."""
        if dtype == jnp.float32:
            # Full float32 products do without matrix units, and hold their operands in registers.
            small = Tile(32, 32, 8, 1)
            return cls(small, small, small)
        if size <= 64:
            return cls(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))
        if size <= 128:
            return cls(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2))
        return cls(Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2))


def _sweep(reach_ref: Any, plan: Plan, tile: Tile, visit: Callable, carry: Any) -> Any:
    """Visits all blocks that `bounds` names; `visit` maps (whether it must mask, block, carry).

    Blocks in the middle are seen whole and need no mask, which is five operations a pair. A narrow
    window has too few of them to pay for loops of their own.
    """
    first, whole, rest, last = (reach_ref[i] for i in range(4))
    left, right = plan.window
    wide = left is None or right is None or left + right >= 4 * max(tile.own, tile.visit)
    if not wide:
        return jax.lax.fori_loop(first, last, partial(visit, True), carry)
    carry = jax.lax.fori_loop(first, whole, partial(visit, True), carry)
    carry = jax.lax.fori_loop(whole, rest, partial(visit, False), carry)
    return jax.lax.fori_loop(rest, last, partial(visit, True), carry)


def _y_kernel(
    reach_ref, run_q_ref, run_k_ref, q_ref, k_ref, v_ref, y_ref, m_ref, l_ref, *, plan, tile
):
    at_q = tokens(pl.program_id(0), tile.own)
    q = plan.load_queries((q_ref, run_q_ref), at_q)

    def visit(masked, j, carry):
        here = pl.ds(j * tile.visit, tile.visit)
        refs = k_ref.at[here], v_ref.at[here], run_k_ref.at[here]
        return plan.visit_keys(carry, q, plan.load_keys(refs, tokens(j, tile.visit), masked))

    u, m, l = _sweep(reach_ref, plan, tile, visit, plan.nothing_seen(tile.own))
    store_rows(y_ref, u / l[:, None], at_q, plan.queries, plan.size)
    store_numbers(m_ref, m, at_q, plan.queries)
    store_numbers(l_ref, jnp.log2(l), at_q, plan.queries)


def _dq_kernel(
    reach_ref,
    run_q_ref,
    run_k_ref,
    q_ref,
    k_ref,
    v_ref,
    dy_ref,
    m_ref,
    l_ref,
    delta_ref,
    dq_ref,
    *,
    plan,
    tile,
):
    at_q = tokens(pl.program_id(0), tile.own)
    q = plan.load_queries((q_ref, run_q_ref), at_q)
    dy = load_rows(dy_ref, at_q, plan.queries, plan.size)
    sums = plan.load_sums((m_ref, l_ref, delta_ref), at_q)

    def visit(masked, j, dq):
        here = pl.ds(j * tile.visit, tile.visit)
        refs = k_ref.at[here], v_ref.at[here], run_k_ref.at[here]
        k = plan.load_keys(refs, tokens(j, tile.visit), masked)
        raw, z = plan.logits(q, k)
        da = plan.dot(dy, k.v, trans_b=True)
        return dq + plan.dot(plan.pull(plan.weights(z, sums), raw, da, sums.delta[:, None]), k.x)

    start = jnp.zeros((tile.own, padded(plan.key_size)), jnp.float32)
    dq = _sweep(reach_ref, plan, tile, visit, start)
    store_rows(dq_ref, dq * plan.score.scale, at_q, plan.queries, plan.key_size)


def _dkv_kernel(
    reach_ref,
    run_q_ref,
    run_k_ref,
    q_ref,
    k_ref,
    v_ref,
    dy_ref,
    m_ref,
    l_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    *,
    plan,
    tile,
):
    at_k = tokens(pl.program_id(0), tile.own)
    keys = plan.load_keys((k_ref, v_ref, run_k_ref), at_k)

    def visit(head, masked, i, carry):
        at_q, here = tokens(i, tile.visit), pl.ds(i * tile.visit, tile.visit)
        q = plan.load_queries((q_ref.at[here, head], run_q_ref.at[here]), at_q)
        dy = load_rows(dy_ref.at[here, head], at_q, plan.queries, plan.size)
        sums = plan.load_sums(tuple(r.at[head, here] for r in (m_ref, l_ref, delta_ref)), at_q)
        return plan.pull_keys(carry, q, keys if masked else keys._replace(run=None), sums, dy)

    start = tuple(
        jnp.zeros((tile.own, padded(size)), jnp.float32) for size in (plan.key_size, plan.size)
    )

    def of_head(head, carry):
        return _sweep(reach_ref, plan, tile, partial(visit, head), carry)

    dk, dv = jax.lax.fori_loop(0, plan.share, of_head, start)
    store_rows(dk_ref, dk * plan.score.scale, at_k, plan.keys, plan.key_size)
    store_rows(dv_ref, dv, at_k, plan.keys, plan.size)


def _heads(tile: int | None, length: int, heads: int | None, size: int, head: Callable) -> Any:
    """Of [B, length, heads, size]: a program's own tile of it, or all tokens, of some heads."""

    def place(i, h, b):
        return b, 0 if tile is None else i, head(h), 0

    return pl.BlockSpec((None, tile or length, heads, padded(size)), place)


def _numbers(tile: int | None, length: int, heads: int | None, head: Callable) -> Any:
    """Of [B, heads, length], likewise."""

    def place(i, h, b):
        return b, head(h), 0 if tile is None else i

    return pl.BlockSpec((None, heads, tile or length), place)


def _runs(tile: int | None, length: int) -> Any:
    return pl.BlockSpec((None, tile or length), lambda i, h, b: (b, 0 if tile is None else i))


_REACH = pl.BlockSpec((None, None, 4), lambda i, h, b: (b, i, 0))


def _same(head: Any) -> Any:
    return head


def _call(kernel: Callable, plan: Plan, tile: Tile, interpret: bool, **specs: Any) -> Callable:
    parameters = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    body = partial(kernel, plan=plan, tile=tile)
    name = f"attention{kernel.__name__.removesuffix('_kernel')}"
    return pl.pallas_call(body, **specs, compiler_params=parameters, interpret=interpret, name=name)


def _by_queries(plan: Plan, tile: Tile) -> tuple[list, Any, Any]:
    """Specs of kernels that own queries: of reach, runs, q, k, v; of y; and of numbers a query."""

    def shared(h):
        return jax.lax.div(h, plan.share)

    own = partial(_heads, tile.own, plan.queries, None)
    every = partial(_heads, None, plan.keys, None)
    inputs = [
        _REACH,
        _runs(tile.own, plan.queries),
        _runs(None, plan.keys),
        own(plan.key_size, _same),
        every(plan.key_size, shared),
        every(plan.size, shared),
    ]
    return inputs, own(plan.size, _same), _numbers(tile.own, plan.queries, None, _same)


def _by_keys(plan: Plan, tile: Tile) -> tuple[list, Any, Any]:
    """The same of the kernel that owns keys; it sees the queries of all heads that share them."""
    own = partial(_heads, tile.own, plan.keys, None)
    every = partial(_heads, None, plan.queries, plan.share)
    inputs = [
        _REACH,
        _runs(None, plan.queries),
        _runs(tile.own, plan.keys),
        every(plan.key_size, _same),
        own(plan.key_size, _same),
        own(plan.size, _same),
    ]
    return inputs, every(plan.size, _same), _numbers(None, plan.queries, plan.share, _same)


class _Settings(NamedTuple):
    window: Window
    score: Score
    tiles: Tiles
    interpret: bool


def _plan(q: Array, k: Array, v: Array, settings: _Settings) -> Plan:
    return Plan(
        settings.window,
        settings.score,
        past=k.shape[1] - q.shape[1],
        queries=q.shape[1],
        keys=k.shape[1],
        key_size=k.shape[3],
        size=v.shape[3],
        share=q.shape[2] // k.shape[2],
        dtype=v.dtype,
    )


def _forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    run_q: Int[Array, "B T"],
    run_k: Int[Array, "B S"],
    settings: _Settings,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"], Float[Array, "B H T"]]:
    """y, the largest raw logit of each query, and log2 of its sum of exponentials above that."""
    plan, tile = _plan(q, k, v, settings), settings.tiles.y
    batch, length, heads, _ = q.shape
    inputs, y, numbers = _by_queries(plan, tile)
    sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    sides = Side(run_q, tile.own), Side(run_k, tile.visit)
    return _call(
        _y_kernel,
        plan,
        tile,
        settings.interpret,
        grid=(pl.cdiv(length, tile.own), heads, batch),
        in_specs=inputs,
        out_specs=[y, numbers, numbers],
        out_shape=[jax.ShapeDtypeStruct((*q.shape[:3], plan.size), v.dtype), sums, sums],
    )(bounds(*sides, plan.past, plan.window), run_q, run_k, q, k, v)


def _backward_q(arrays: tuple, sums: tuple, dy: Array, settings: _Settings) -> Array:
    q, k, v, run_q, run_k = arrays
    plan, tile = _plan(q, k, v, settings), settings.tiles.dq
    inputs, y, numbers = _by_queries(plan, tile)
    sides = Side(run_q, tile.own), Side(run_k, tile.visit)
    return _call(
        _dq_kernel,
        plan,
        tile,
        settings.interpret,
        grid=(pl.cdiv(plan.queries, tile.own), q.shape[2], q.shape[0]),
        in_specs=[*inputs, y, numbers, numbers, numbers],
        out_specs=inputs[3],
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(bounds(*sides, plan.past, plan.window), run_q, run_k, q, k, v, dy, *sums)


def _backward_kv(arrays: tuple, sums: tuple, dy: Array, settings: _Settings) -> tuple[Array, Array]:
    q, k, v, run_q, run_k = arrays
    plan, tile = _plan(q, k, v, settings), settings.tiles.dkv
    inputs, y, numbers = _by_keys(plan, tile)
    sides = Side(run_k, tile.own), Side(run_q, tile.visit)
    # Seen from a key, the window looks the other way.
    window = Window(plan.window.right, plan.window.left)
    dk, dv = _call(
        _dkv_kernel,
        plan,
        tile,
        settings.interpret,
        grid=(pl.cdiv(plan.keys, tile.own), k.shape[2], q.shape[0]),
        in_specs=[*inputs, y, numbers, numbers, numbers],
        out_specs=inputs[4:6],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    )(bounds(*sides, -plan.past, window), run_q, run_k, q, k, v, dy, *sums)
    return dk, dv


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, settings: _Settings
) -> Array:
    return _forward(q, k, v, run_q, run_k, settings)[0]


def _attention_forward(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, settings: _Settings
) -> tuple[Array, tuple]:
    y, m, l = keep(_forward(q, k, v, run_q, run_k, settings))
    return y, ((q, k, v, run_q, run_k), y, m, l)


def _attention_backward(settings: _Settings, saved: tuple, dy: Array) -> tuple:
    arrays, y, m, l = saved
    delta = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    sums = m, l, jnp.swapaxes(delta, 1, 2)
    dq = _backward_q(arrays, sums, dy, settings)
    dk, dv = _backward_kv(arrays, sums, dy, settings)
    return dq, dk, dv, None, None


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
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H D"]:
    """`latte.ops.attention.attention` in one kernel; the last T of the S keys are the queries' own.

    Args:
        tiles: how the kernels cut their work; by head size and type where None.
        interpret: run them as plain JAX, on any machine.

    Raises:
        ValueError: the scale or the soft cap is not above 0, or an array is too large to be
            addressed by 32 bits.
    """
    if score.scale <= 0 or (score.softcap is not None and score.softcap <= 0):
        raise ValueError(f"the kernels need a scale and a soft cap above 0, not {score}")
    if max(q.size, k.size, v.size, q.size // q.shape[3] * v.shape[3]) >= 2**31:
        raise ValueError("the kernels count entries of an array in 32 bits: split the batch")
    if tiles is None:
        tiles = Tiles.of(max(q.shape[3], v.shape[3]), v.dtype)
    settings = _Settings(window, score, tiles, interpret)
    return _attention(q.astype(v.dtype), k.astype(v.dtype), v, run_q, run_k, settings)
