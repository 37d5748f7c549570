"""Latte-Macchiato: latents and a sliding window in one normalised mixture (equations 15-17).

Of N + 1 states a head, state 0 is softmax attention through a window and the others are Latte's
latents; both read the same values:

    p_t = softmax(q_t)                                            over the N + 1 states
    y_t = p_t0 Σ_s softmax_s(scale · qw_t·kw_s) v_s + Σ_{n≥1} p_tn S_tn

so the weights of all tokens that y_t mixes sum to one.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte.ops import context
from latte.ops.attention import after_past, attention, remember
from latte.ops.attention import state_before as window_before
from latte.ops.attention.scores import Score
from latte.ops.chunk import accumulator
from latte.ops.dispatch import choose
from latte.ops.latte import latte, mix_bidirectional
from latte.ops.latte import state_before as latents_before
from latte.ops.macchiato import gpu, tpu
from latte.ops.macchiato.state import MacchiatoState, empty_state

__all__ = ["MacchiatoState", "bidirectional", "macchiato", "parts", "reference"]


def _fused(
    q: Array,
    k: Array,
    v: Array,
    qw: Array,
    kw: Array,
    *,
    window: int,
    scale: float | None,
    softcap: float | None,
    segment_ids: Array | None,
    state: MacchiatoState | None,
    kernel: Callable,
) -> tuple[Array, MacchiatoState]:
    """Both parts at once, in a kernel that takes the window's cache in front of kw and v."""
    latents = (empty_state(k, v, kw, window) if state is None else state).latents
    local = None if state is None else state.window
    kw, v, runs, run_k = after_past(kw, v, segment_ids, local)
    score = Score.of(qw.shape[3], scale, softcap)
    y, latents = kernel(q, k, v, qw, kw, runs, run_k, latents, window, score)
    kept = window - 1 if local is None else local.k.shape[1]
    return y, MacchiatoState(latents, remember(kw, v, runs, run_k, kept))


_KERNELS = {"tpu": tpu.macchiato, "gpu": partial(_fused, kernel=gpu.macchiato)}


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
    impl: str | None = None,
    axis: str | None = None,
) -> tuple[Float[Array, "B T H D"], MacchiatoState]:
    """Causal Latte-Macchiato over packed documents, exact for every finite input.

    Args:
        q: logits over the L = N + 1 states, the window's first.
        k: key logits of the N latents.
        v: values, with G ≤ H heads; y has their type.
        qw, kw: the window's queries and keys, already rotated.
        window: keys that a token sees through the window, itself included, W.
        scale, softcap: of the window's logits, as in `latte.ops.attention`.
        segment_ids, state, impl, axis: as in `latte.ops.latte`.

    Returns:
        y and the state after the last token.

    Raises:
        ValueError: H is no multiple of G, or `impl` is not there or does not take these arrays.
    """
    if q.shape[2] % v.shape[2]:
        raise ValueError(f"{q.shape[2]} heads cannot share {v.shape[2]} key-value heads evenly")
    if axis is not None:
        state = _state_before((k, v, kw), window, context.numbered(segment_ids), state, axis)
    # One token needs no kernel, and kernels have no float64.
    taken = q.shape[1] > 1 and v.dtype in (jnp.bfloat16, jnp.float32)
    fits = {
        "tpu": taken and tpu.fits(q, v, qw, window),
        "gpu": taken and (scale is None or scale > 0),
    }
    # Where no kernel is, each part has its own best form.
    forms = {name: partial(parts, impl=impl) for name in ("reference", "xla")}
    form = choose("macchiato", impl, forms, _KERNELS, fits=fits)
    return form(
        *(q, k, v, qw, kw),
        window=window,
        scale=scale,
        softcap=softcap,
        segment_ids=segment_ids,
        state=state,
    )


def parts(
    q: Array,
    k: Array,
    v: Array,
    qw: Array,
    kw: Array,
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    segment_ids: Array | None = None,
    state: MacchiatoState | None = None,
    impl: str | None = None,
) -> tuple[Array, MacchiatoState]:
    """`macchiato` from attention and Latte, one after the other, each in the form `impl`."""
    p = jax.nn.softmax(q.astype(accumulator(v.dtype)), axis=-1)
    latents, local = (None, None) if state is None else state
    near, local = attention(
        qw,
        kw,
        v,
        window=window,
        scale=scale,
        softcap=softcap,
        segment_ids=segment_ids,
        state=local,
        impl=impl,
    )
    # p over the latents is a softmax of its own, times the mass that the window leaves.
    values = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    far, latents = latte(q[..., 1:], k, values, segment_ids=segment_ids, state=latents, impl=impl)
    y = p[..., :1] * near + jnp.sum(p[..., 1:], axis=-1, keepdims=True) * far
    return y.astype(v.dtype), MacchiatoState(latents, local)


def _state_before(
    arrays: tuple[Array, Array, Array],
    window: int,
    segment_ids: Int[Array, "B T"],
    state: MacchiatoState | None,
    axis: str,
) -> MacchiatoState:
    """The states before each device's part of a row that begins at `state`."""
    k, v, kw = arrays
    latents, local = state or empty_state(k, v, kw, window, accumulator(v.dtype))
    values = jnp.repeat(v, k.shape[2] // v.shape[2], axis=2)
    return MacchiatoState(
        latents_before(k, values, segment_ids, latents, axis),
        window_before(kw, v, segment_ids, local, window - 1, axis),
    )


def reference(
    q: Float[Array, "B T H L"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T G D"],
    qw: Float[Array, "B T H K"],
    kw: Float[Array, "B T G K"],
    **settings,
) -> tuple[Float[Array, "B T H D"], MacchiatoState]:
    """The definition, from the definitions of its parts. Settings are those of `macchiato`."""
    return macchiato(q, k, v, qw, kw, impl="reference", **settings)


def bidirectional(
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
    impl: str | None = None,
) -> Float[Array, "B T H D"]:
    """`macchiato` for encoders: latents of whole documents, W − 1 tokens to each side."""
    p = jax.nn.softmax(q.astype(accumulator(v.dtype)), axis=-1)
    values = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    near, _ = attention(
        qw,
        kw,
        v,
        window=(window - 1, window - 1),
        scale=scale,
        softcap=softcap,
        segment_ids=segment_ids,
        impl=impl,
    )
    far = mix_bidirectional(p[..., 1:], k, values, segment_ids=segment_ids, impl=impl)
    return (p[..., :1] * near + far).astype(v.dtype)
