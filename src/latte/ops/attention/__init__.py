"""Softmax attention over packed documents, full or windowed (equations 1 to 3, 17).

    y_t = Σ_s softmax_s(cap(scale · q_t·k_s)) v_s        over s in t's document and window

A window of W holds W keys, the token itself included (equation 17 as printed holds W + 1). Fewer
key-value heads G than query heads H are shared by H / G query heads each, in order.

The state is a cache of the last S tokens: W − 1 for a window, so that a step costs the same however
long the past; for full attention as many as the given state has room for, or all T where none is
given. A full cache forgets its oldest token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from latte.ops import context
from latte.ops.attention import cudnn, gpu, tpu, xla
from latte.ops.attention.scores import Score, Window
from latte.ops.chunk import accumulator, visible
from latte.ops.dispatch import choose
from latte.ops.segments import EMPTY, Runs, number_runs

__all__ = [
    "AttentionState",
    "after_past",
    "attention",
    "empty_state",
    "reference",
    "remember",
]


class AttentionState(NamedTuple):
    """The keys and values that later tokens may read, oldest first.

    seen: which places hold a token of the document that the last token belongs to.
    segment: the segment id of the last token.
    """

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G D"]
    seen: Bool[Array, "B S"]
    segment: Int[Array, " B"]


def empty_state(
    batch: int,
    room: int,
    kv_heads: int,
    key_size: int,
    size: int,
    dtype: DTypeLike = jnp.float32,
) -> AttentionState:
    """A cache with room for `room` tokens that has seen none."""
    return AttentionState(
        k=jnp.zeros((batch, room, kv_heads, key_size), dtype),
        v=jnp.zeros((batch, room, kv_heads, size), dtype),
        seen=jnp.zeros((batch, room), bool),
        segment=jnp.full((batch,), EMPTY, jnp.int32),
    )


def _reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    run_q: Int[Array, "B T"],
    run_k: Int[Array, "B S"],
    window: Window,
    score: Score,
) -> Float[Array, "B T H D"]:
    """Every pair of tokens written out; the last T of the S keys are the queries' own tokens."""
    wide = accumulator(v.dtype)
    share = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x.astype(wide), share, axis=2) for x in (k, v))
    logits = score(jnp.einsum("bthk,bshk->bhts", q.astype(wide), k, precision="highest"))
    at_q = jnp.arange(q.shape[1]) + k.shape[1] - q.shape[1]
    mask = visible(run_q, run_k) & window.holds(at_q[:, None], jnp.arange(k.shape[1]))
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest").astype(v.dtype)


def _cudnn(
    q: Array, k: Array, v: Array, run_q: Array, run_k: Array, window: Window, score: Score
) -> Array:
    """cuDNN's form, of tokens that all belong to one document."""
    return cudnn.attention(q, k, v, window, score)


_FORMS = {"reference": _reference, "xla": xla.attention}
_KERNELS = {"tpu": tpu.attention, "gpu": gpu.attention}


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G D"],
    *,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: AttentionState | None = None,
    impl: str | None = None,
    axis: str | None = None,
) -> tuple[Float[Array, "B T H D"], AttentionState]:
    """Attention of each token to those of its document that its window holds.

    Args:
        q, k, v: queries, keys and values; y has v's type, softmax sums are float32 or wider.
        window: W keys, the token itself included; or how many tokens to the (left, right), None for
            all; None is the whole past. A window that looks right has no state to carry.
        scale: of the products; 1/√K by default.
        softcap: c · tanh(logit / c), as in Gemma 2.
        segment_ids: the document of each token, ≥ 0; nothing crosses from one to the next.
        state: what an earlier call returned; its document goes on where the segment id is the same.
        impl: None, "reference", "xla", "pallas" or "cudnn"; one asked for by name never gives way
            to another. On a GPU None is cuDNN, the fastest, wherever it takes the call.
        axis: inside `jax.shard_map`, the mesh axis that T is spread over (`latte.ops.context`): a
            part begins where those before it end, and the state returned is that of the part.
            A window's part gets the tokens that it reaches from its left neighbour, full attention
            all tokens from all.

    Returns:
        y and the state after the last token.

    Raises:
        ValueError: H is no multiple of G, `impl` is not there or does not take the call, a window
            that looks right is given a state or a part of a row, or a part is shorter than its
            window reaches.
    """
    _, length, heads, key_size = q.shape
    kv_heads = v.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly")
    reach = Window.of(window)
    if (state is not None or axis is not None) and reach.right != 0:
        raise ValueError("a window that looks right has no state: give the whole sequence at once")
    if axis is not None:
        state = state_before(k, v, context.numbered(segment_ids), state, reach.left, axis)
    if state is not None:
        kept = state.k.shape[1]
    else:
        kept = length if reach.left is None else reach.left * (reach.right == 0)
    k, v, runs, run_k = after_past(k, v, segment_ids, state)
    score = Score.of(key_size, scale, softcap)
    # One token needs no kernel, and kernels have no float64.
    fits = length > 1 and v.dtype in (jnp.bfloat16, jnp.float32) and score.scale > 0
    forms = dict(_FORMS)
    if segment_ids is None and state is None and cudnn.fits(q, k, v, reach, score):
        forms["cudnn"] = _cudnn
    elif impl == "cudnn":
        raise ValueError("cuDNN takes rows of one document and no past, 16 bits and no soft cap")
    form = choose("attention", impl, forms, _KERNELS, fits=fits, native={"gpu": "cudnn"})
    y = form(q, k, v, runs.run, run_k, reach, score)
    return y, remember(k, v, runs, run_k, kept)


def after_past(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G D"],
    segment_ids: Int[Array, "B T"] | None,
    state: AttentionState | None,
) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G D"], Runs, Int[Array, "B S"]]:
    """Keys and values after those of a state, the tokens' documents, and the keys' run numbers."""
    batch, length = k.shape[:2]
    if state is None:
        runs = number_runs(segment_ids, jnp.full((batch,), EMPTY, jnp.int32), length)
        return k, v, runs, runs.run
    runs = number_runs(segment_ids, state.segment, length)
    run_k = jnp.concatenate([jnp.where(state.seen, 0, EMPTY), runs.run], axis=1)
    k = jnp.concatenate([state.k.astype(k.dtype), k], axis=1)
    v = jnp.concatenate([state.v.astype(v.dtype), v], axis=1)
    return k, v, runs, run_k


def remember(
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    runs: Runs,
    run_k: Int[Array, "B S"],
    kept: int,
) -> AttentionState:
    """The state after these keys and values, with room for `kept` tokens."""
    seen = run_k == runs.run[:, -1:]
    return AttentionState(_last(k, kept), _last(v, kept), _last(seen, kept), runs.last)


def state_before(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G D"],
    segment_ids: Int[Array, "B T"],
    state: AttentionState | None,
    left: int | None,
    axis: str,
) -> AttentionState:
    """The cache before each device's part of a row that begins at `state`."""
    length = v.shape[1]
    if left is None:
        if state is not None:
            raise ValueError("full attention over several devices begins with its row, at no state")
        return _all_before(k, v, segment_ids, axis)
    if length < left:
        raise ValueError(
            f"a window that reaches {left} tokens back does not fit parts of {length} tokens: "
            "spread the row over fewer devices"
        )
    if state is None:
        state = empty_state(v.shape[0], left, v.shape[2], k.shape[3], v.shape[3], v.dtype)
    part = AttentionState(
        _last(k, left).astype(state.k.dtype),
        _last(v, left).astype(state.v.dtype),
        _last(segment_ids == segment_ids[:, -1:], left),
        segment_ids[:, -1],
    )
    return context.from_left(part, axis, state)


def _all_before(k: Array, v: Array, segment_ids: Int[Array, "B T"], axis: str) -> AttentionState:
    """All tokens of the parts to the left, as a cache of the same size on every device."""
    count, index, length = jax.lax.axis_size(axis), jax.lax.axis_index(axis), v.shape[1]

    def gather(x: Array) -> Array:
        whole = jax.lax.all_gather(x, axis, axis=1, tiled=True)
        # Own tokens first, then those of later parts, then those of earlier ones in order.
        return jnp.roll(whole, -index * length, axis=1)[:, length:]

    segment = context.from_left(segment_ids[:, -1], axis, jnp.full(v.shape[:1], EMPTY, jnp.int32))
    earlier = jnp.arange((count - 1) * length) >= (count - 1 - index) * length
    seen = (gather(segment_ids) == segment[:, None]) & earlier
    return AttentionState(gather(k), gather(v), seen, segment)


def _last(x: Array, count: int) -> Array:
    """The last tokens of x [B, S, …], after zeros where there are fewer."""
    missing = max(count - x.shape[1], 0)
    x = jnp.pad(x, ((0, 0), (missing, 0), *[(0, 0)] * (x.ndim - 2)))
    return x[:, x.shape[1] - count :]


def reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G D"],
    **settings,
) -> tuple[Float[Array, "B T H D"], AttentionState]:
    """The definition: every pair of tokens written out. Settings are those of `attention`."""
    return attention(q, k, v, impl="reference", **settings)
