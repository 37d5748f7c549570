"""Latte: causal latent attention (Dolga et al., TMLR, equations 7-14), a gated recurrence.

Per head, with query logits q, key logits k (N latents) and values v, and the running log-normaliser
c_t = log Σ_{s≤t} exp(k_s) of each latent:

    p_t = softmax(q_t)                        p(l|t)
    S_t = exp(c_{t-1} − c_t) S_{t-1} + exp(k_t − c_t) v_tᵀ
    y_t = p_tᵀ S_t                            equation 11

S is a convex mixture of the values seen, so it is bounded by them. c is never one float: it is kept
as m, the largest logit seen, and l = log Σ exp(k − m) ≥ 0, and differences are taken part by part;
at logits of 1e4 a single float32 would lose three digits.

`latte` is the public function and `reference` its definition, one token after another.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte.ops import context
from latte.ops.chunk import accumulator
from latte.ops.dispatch import choose
from latte.ops.latte import gpu, tpu, xla
from latte.ops.latte.bidirectional import mix_bidirectional
from latte.ops.latte.state import LatteState, empty_state, merge, read_apart, scan_tokens
from latte.ops.segments import Runs, number_runs

__all__ = [
    "LatteState",
    "bidirectional",
    "empty_state",
    "latte",
    "merge",
    "mix_bidirectional",
    "reference",
    "state_before",
]


def _tokens(
    p: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    runs: Runs,
    state: LatteState,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    wide = accumulator(v.dtype)
    tokens = [jnp.moveaxis(x, 1, 0).astype(wide) for x in (p, k, v)]
    y, after = scan_tokens(state, (*tokens, runs.first.T))
    return jnp.moveaxis(y, 0, 1).astype(v.dtype), after._replace(segment=runs.last)


def _of_weights(form: Callable) -> Callable:
    """A form that is given p, as one that is given q; kernels take the softmax themselves."""

    def of_logits(q: Array, k: Array, v: Array, runs: Runs, state: LatteState):
        p = jax.nn.softmax(q.astype(accumulator(v.dtype)), axis=-1)
        return form(p, k, v, runs, state)

    return of_logits


_FORMS = {"reference": _of_weights(_tokens), "xla": _of_weights(xla.mix)}
_KERNELS = {"tpu": tpu.latte, "gpu": gpu.latte}


def latte(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: LatteState | None = None,
    impl: str | None = None,
    axis: str | None = None,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    """Causal latent attention over packed documents, exact for every finite input.

    Args:
        q, k: logits of p(l|t) and of p(s|l), before their softmaxes.
        v: values; y has their type. Sums and the state are float32 (float64 for float64 values).
        segment_ids: the document of each token, ≥ 0; nothing crosses from one to the next.
        state: what an earlier call returned; its document goes on where the segment id is the same.
        impl: None, "reference", "xla" or "pallas"; one asked for by name never gives way to
            another.
        axis: inside `jax.shard_map`, the mesh axis that T is spread over (`latte.ops.context`): a
            part begins where those before it end, and the state returned is that of the part.

    Returns:
        y and the state after the last token.

    Raises:
        ValueError: `impl` is not there.
    """
    batch, length, heads, latents = k.shape
    if state is None:
        state = empty_state(batch, heads, latents, v.shape[-1], accumulator(v.dtype))
    if axis is not None:
        state = state_before(k, v, segment_ids, state, axis)
    runs = number_runs(segment_ids, state.segment, length)
    # One token needs no kernel, and kernels have no float64.
    fits = length > 1 and v.dtype in (jnp.bfloat16, jnp.float32)
    return choose("latte", impl, _FORMS, _KERNELS, fits=fits)(q, k, v, runs, state)


def state_before(
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    segment_ids: Int[Array, "B T"] | None,
    state: LatteState,
    axis: str,
) -> LatteState:
    """The state before each device's part of a row that begins at `state`."""
    part = read_apart(k, v, context.numbered(segment_ids))
    batch, heads, latents, size = part.s.shape
    empty = empty_state(batch, heads, latents, size, part.s.dtype)
    return context.before(part, merge, axis, empty, state)


def reference(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: LatteState | None = None,
) -> tuple[Float[Array, "B T H D"], LatteState]:
    """The definition: one token after another."""
    return latte(q, k, v, segment_ids=segment_ids, state=state, impl="reference")


def bidirectional(
    q: Float[Array, "B T H N"],
    k: Float[Array, "B T H N"],
    v: Float[Array, "B T H D"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    impl: str | None = None,
) -> Float[Array, "B T H D"]:
    """Latent attention over whole documents, past and future (equation 6); for encoders.

    Arguments and errors are those of `latte`; there is no state, because every token sees the last.
    """
    p = jax.nn.softmax(q.astype(accumulator(v.dtype)), axis=-1)
    return mix_bidirectional(p, k, v, segment_ids=segment_ids, impl=impl)
