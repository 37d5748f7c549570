"""Latte-Macchiato: latents and a sliding window in one normalised mixture (equations 15-17).

Of N + 1 states a head, state 0 is softmax attention through a window and the others are Latte's
latents; both read the same values:

    p_t = softmax(q_t)                                            over the N + 1 states
    y_t = p_t0 Σ_s softmax_s(scale · qw_t·kw_s) v_s + Σ_{n≥1} p_tn S_tn

so the weights of all tokens that y_t mixes sum to one.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte.ops.attention import attention
from latte.ops.chunk import accumulator
from latte.ops.dispatch import choose
from latte.ops.latte import latte, mix_bidirectional
from latte.ops.macchiato import tpu
from latte.ops.macchiato.state import MacchiatoState

__all__ = ["MacchiatoState", "bidirectional", "macchiato", "reference"]


def _parts(
    q: Float[Array, "B T H L"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T G D"],
    qw: Float[Array, "B T H K"],
    kw: Float[Array, "B T G K"],
    *,
    window: int,
    scale: float | None,
    softcap: float | None,
    segment_ids: Int[Array, "B T"] | None,
    state: MacchiatoState | None,
    impl: str | None,
) -> tuple[Float[Array, "B T H D"], MacchiatoState]:
    """Two ops, and the mixture of what they return."""
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


_FORMS = {name: functools.partial(_parts, impl=name) for name in ("reference", "xla")}
_KERNELS = {"tpu": tpu.macchiato}


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
) -> tuple[Float[Array, "B T H D"], MacchiatoState]:
    """Causal Latte-Macchiato over packed documents, exact for every finite input.

    Args:
        q: logits over the L = N + 1 states, the window's first.
        k: key logits of the N latents.
        v: values, with G ≤ H heads; y has their type.
        qw, kw: the window's queries and keys, already rotated.
        window: keys that a token sees through the window, itself included, W.
        scale, softcap: of the window's logits, as in `latte.ops.attention`.
        segment_ids, state, impl: as in `latte.ops.latte`.

    Returns:
        y and the state after the last token.

    Raises:
        ValueError: H is no multiple of G, or `impl` is not there.
    """
    fits = tpu.fits(q, v, qw, window)
    # Where no fused kernel fits, each part chooses for itself.
    forms = _FORMS if impl else _FORMS | {"xla": functools.partial(_parts, impl=None)}
    form = choose("macchiato", impl, forms, _KERNELS, fits=fits)
    return form(
        q,
        k,
        v,
        qw,
        kw,
        window=window,
        scale=scale,
        softcap=softcap,
        segment_ids=segment_ids,
        state=state,
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
