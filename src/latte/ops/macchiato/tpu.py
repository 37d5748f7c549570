"""Macchiato on TPU: latents and window in one Pallas kernel, forward and backward.

The forward kernel goes over the chunks in order with Latte's state and the window's last keys and
values in VMEM, adds the two parts' weights within a chunk before one product with v, and reads
every array once. The backward pass computes the latents' chunk states again and walks from the last
chunk to the first; a window's softmax is computed again where its gradient is needed. What is
Latte's is `latte.ops.latte.tpu`'s.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte.ops.attention.scores import Score
from latte.ops.latte.state import LatteState
from latte.ops.latte.tpu import carried, carried_gradient, state_gradient, state_of
from latte.ops.latte.tpu_backward import chunk_states
from latte.ops.latte.tpu_chunk import Layout
from latte.ops.macchiato.state import MacchiatoState, cached_runs, empty_state, window_after
from latte.ops.macchiato.tpu_backward import backward
from latte.ops.macchiato.tpu_forward import forward
from latte.ops.macchiato.tpu_layout import Cache, Plan, State, Tokens
from latte.ops.segments import EMPTY, number_runs

_LANES = 128
_VMEM = {2: 12 * 2**20, 4: 8 * 2**20}
"""Bytes of blocks and scratch, as in `latte.ops.latte.tpu`."""


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut a call up: tokens of a chunk, and at most so many heads in a grid step.

    A chunk is a multiple of 128 on a TPU, of 16 in an interpreter.
    """

    chunk: int = 128
    heads: int = 16


def _room(plan: Plan, item: int, *, backward: bool) -> int:
    """About the bytes that a kernel keeps in VMEM: blocks that come and go twice (one is computed
    on while another moves), scratch once."""
    layout, reach = plan.latte, plan.before * plan.latte.chunk
    latents, values, keys = layout.latents, layout.size, plan.key_size
    state, near = 4 * latents * (values + -values % _LANES), reach * (values + keys)
    weights = 4 * layout.chunk * latents
    if backward:
        tokens = 2 * plan.states + 2 * latents + 3 * values + 4 * keys
        each = 7 * state + near * (4 * item + 4) + 6 * weights
    else:
        tokens = plan.states + latents + 2 * values + 2 * keys
        each = 5 * state + near * item + weights
    return layout.block * (2 * layout.chunk * tokens * item + each)


def _plan(
    q: Array,
    v: Array,
    qw: Array,
    window: int,
    score: Score,
    tiles: Tiles,
    interpret: Any,
    *,
    backward: bool,
) -> Plan:
    batch, length, heads, states = q.shape
    latents, size, key_size = states - 1, v.shape[-1], qw.shape[-1]
    unit = 16 if interpret else _LANES
    if tiles.chunk < 1 or tiles.chunk % unit:
        raise ValueError(f"macchiato: a chunk of {tiles.chunk} tokens is not a multiple of {unit}")
    dtypes = [x.dtype for x in (q, v, qw) if x.dtype not in (jnp.bfloat16, jnp.float32)]
    if dtypes:
        raise ValueError(f"macchiato: TPU kernels compute in bfloat16 or float32, not {dtypes[0]}")
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    whole = [n for n in divisors if not (n * latents % _LANES or n * size % _LANES)]
    group = whole[0] if whole else heads
    padded, item = length + -length % tiles.chunk, v.dtype.itemsize

    def of_block(block: int) -> Plan:
        sizes = latents, size, tiles.chunk, group, block
        layout = Layout(batch, padded, heads, *sizes, jnp.dtype(v.dtype))
        return Plan(layout, key_size, window, score.scale, score.softcap)

    def possible(block: int) -> bool:
        # q's rows are cut in tiles of 8, lanes of keys in tiles of 128.
        whole = not (block * states % 8 or block * key_size % _LANES)
        small = _room(of_block(block), item, backward=backward) <= _VMEM[item]
        return small and (whole or block == heads)

    blocks = [n for n in divisors if n % group == 0 and (interpret or possible(n))]
    if not blocks:
        raise ValueError(
            f"macchiato: {heads} heads of {latents} latents, {size} values and a window of {window}"
            f" keys of {key_size} have no blocks that fit into VMEM"
        )
    most = max(tiles.heads, blocks[0])
    return of_block(max(n for n in blocks if n <= most))


def _plans(
    q: Array,
    v: Array,
    qw: Array,
    window: int,
    score: Score,
    tiles: Tiles = Tiles(),
    interpret: Any = False,
) -> tuple[Plan, Plan]:
    """Of the forward and of the backward pass, which has more to keep."""
    forward, backward = (
        _plan(q, v, qw, window, score, tiles, interpret, backward=x) for x in (False, True)
    )
    return forward, backward


def fits(q: Array, v: Array, qw: Array, window: int) -> bool:
    """Whether the kernels take these arrays; one token needs none."""
    if q.shape[1] == 1 or q.shape[2] % v.shape[2]:
        return False
    try:
        _plans(q, v, qw, window, Score(1.0, None))
    except ValueError:
        return False
    return True


def _flat(x: Array, length: int, fill: float = 0.0) -> Array:
    """[B, T, H, X] as [B, T, H · X], filled up to whole chunks."""
    x = x.reshape(*x.shape[:2], -1)
    missing = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0)), constant_values=fill) if missing else x


def _turned(q: Array, length: int) -> Array:
    """[B, T, H, N + 1] as [B, H · (N + 1), T], filled up to whole chunks."""
    q = jnp.swapaxes(q.reshape(*q.shape[:2], -1), 1, 2)
    return jnp.pad(q, ((0, 0), (0, 0), (0, length - q.shape[2])))


def _tokens(plan: Plan, arrays: Tokens) -> Tokens:
    length = plan.latte.length
    wide = (_flat(x, length) for x in arrays[2:])
    # A logit of −∞ has no weight.
    return Tokens(_turned(arrays.q, length), _flat(arrays.k, length, -jnp.inf), *wide)


def _cache(plan: Plan, cache: Cache) -> Cache:
    """Filled up in front to whole chunks."""
    room = plan.before * plan.latte.chunk

    def fill(x: Array) -> Array:
        x = x[:, max(x.shape[1] - room, 0) :]
        x = x.reshape(*x.shape[:2], plan.latte.heads * x.shape[-1])
        return jnp.pad(x, ((0, 0), (room - x.shape[1], 0), (0, 0)))

    return Cache(*(fill(x) for x in cache))


def _run_rows(plan: Plan, run: Array, past_run: Array) -> tuple[Array, Array]:
    """Each token's run number and that of the token before it (0 before the first), [B, 2, T];
    and the former with those of the cache in front, [B, 1, S]."""
    run = jnp.pad(run, ((0, 0), (0, plan.latte.length - run.shape[1])), mode="edge")
    before = jnp.pad(run[:, :-1], ((0, 0), (1, 0)))
    room = plan.before * plan.latte.chunk
    past = past_run[:, max(past_run.shape[1] - room, 0) :]
    past = jnp.pad(past, ((0, 0), (room - past.shape[1], 0)), constant_values=EMPTY)
    return jnp.stack([run, before], axis=1), jnp.concatenate([past, run], axis=1)[:, None]


def _mix(
    settings: tuple, arrays: Tokens, runs: tuple[Array, Array], state: tuple, cache: Cache
) -> tuple:
    (plan, _), interpret = settings
    y, after = forward(
        plan,
        *_run_rows(plan, *runs),
        _tokens(plan, arrays),
        _cache(plan, cache),
        State(*carried(*state)),
        interpret,
    )
    length = arrays.v.shape[1]
    return y[:, :length].reshape(arrays.v.shape), *state_of(*after, plan.latte)


def _mix_forward(settings: tuple, *args: Any) -> tuple:
    out = _mix(settings, *args)
    return out, (args, out[2:])


def _mix_backward(settings: tuple, saved: tuple, cotangent: tuple) -> tuple:
    (wide, plan), interpret = settings
    (arrays, runs, state, cache), (l, s) = saved
    dy, _, dl, ds = cotangent
    tokens, (own, past) = _tokens(plan, arrays), _run_rows(plan, *runs)
    rows, before = carried(*state)
    states = chunk_states(wide.latte, own, tokens.k, tokens.v, rows, before, interpret)
    ahead, length = State(*carried_gradient(l, s, dl, ds)), arrays.v.shape[1]
    dy, padded = _flat(dy, plan.latte.length), _cache(plan, cache)
    grads, near, g = backward(plan, own, past, tokens, dy, padded, states, ahead, interpret)
    dq = jnp.swapaxes(grads.q[..., :length], 1, 2)
    d_arrays = (x[:, :length] for x in grads[1:])
    d_arrays = Tokens(*(x.reshape(y.shape) for x, y in zip((dq, *d_arrays), arrays, strict=True)))
    near = Cache(*(x.astype(y.dtype) for x, y in zip(near, cache, strict=True)))
    (d_cache,) = jax.vjp(functools.partial(_cache, plan), cache)[1](near)
    return d_arrays, (None, None), state_gradient(*g, *state), d_cache


_mixed = jax.custom_vjp(_mix, nondiff_argnums=(0,))
_mixed.defvjp(_mix_forward, _mix_backward)


def macchiato(
    q: Float[Array, "B T H L"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T G D"],
    qw: Float[Array, "B T H K"],
    kw: Float[Array, "B T G K"],
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: MacchiatoState | None = None,
    tiles: Tiles = Tiles(),
    interpret: Any = False,
) -> tuple[Float[Array, "B T H D"], MacchiatoState]:
    """`latte.ops.macchiato.macchiato` in one kernel; bfloat16 or float32, with a float32 state.

    Heads that share keys and values each read a copy of their own.

    Args:
        tiles: how the kernels cut the call up.
        interpret: False, True, or `pltpu.InterpretParams` to run without a TPU.

    Raises:
        ValueError: arrays that the kernels do not have a form for, or have no room for.
    """
    state = empty_state(k, v, kw, window) if state is None else state
    score = Score(qw.shape[-1] ** -0.5 if scale is None else scale, softcap)
    share = q.shape[2] // v.shape[2]

    def every_head(x: Array, dtype: Any) -> Array:
        return x.astype(dtype) if share == 1 else jnp.repeat(x.astype(dtype), share, axis=2)

    before, cache = state
    runs = number_runs(segment_ids, before.segment, q.shape[1])
    m = jax.lax.stop_gradient(before.m)
    y, m, l, s = _mixed(
        (_plans(q, v, qw, window, score, tiles, interpret), interpret),
        Tokens(q, k, every_head(v, v.dtype), qw, every_head(kw, kw.dtype)),
        (runs.run, cached_runs(cache)),
        (m, before.l, before.s),
        Cache(every_head(cache.k, kw.dtype), every_head(cache.v, v.dtype)),
    )
    after = LatteState(jax.lax.stop_gradient(m), l, s, runs.last)
    return y, MacchiatoState(after, window_after(cache, kw, v, runs))
