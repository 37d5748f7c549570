"""RG-LRU: the real-gated linear recurrent unit (De et al., Griffin, 2024, eq. 1–4).

    log a_t = −8 softplus(Λ) σ(r_t)                         decay, one a channel
    h_t     = a_t h_{t−1} + √(1−a_t²) · σ(i_t) · x_t

At the first token of a document a → 0 and the multiplier √(1−a²) → 1, so h = σ(i) x there. The
state is h itself, kept in float32 (float64 where the inputs are float64) whatever the inputs are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from latte.ops import context
from latte.ops.chunk import accumulator
from latte.ops.dispatch import choose
from latte.ops.rg_lru import gpu, tpu, xla
from latte.ops.rg_lru.gates import log_decay, multiplier
from latte.ops.segments import EMPTY, number_runs


class RGLRUState(NamedTuple):
    """h after the last token, and that token's segment id."""

    h: Float[Array, "B W"]
    segment: Int[Array, " B"]


def empty_state(batch: int, width: int, dtype: DTypeLike = jnp.float32) -> RGLRUState:
    """The state before any token."""
    return RGLRUState(jnp.zeros((batch, width), dtype), jnp.full((batch,), EMPTY, jnp.int32))


def _recurrence_reference(
    x: Float[Array, "B T W"],
    r: Float[Array, "B T W"],
    i: Float[Array, "B T W"],
    lam: Float[Array, " W"],
    first: Bool[Array, "B T"],
    h: Float[Array, "B W"],
    reverse: bool = False,
) -> tuple[Float[Array, "B T W"], Float[Array, "B W"]]:
    """Token by token, in h's dtype; `first` marks where documents begin."""

    def token(h, inputs):
        x, r, i, first = inputs
        first = first[:, None]
        a = jnp.where(first, 0, jnp.exp(log_decay(r, lam)))
        m = jnp.where(first, 1, multiplier(r, lam))
        h = a * h + m * jax.nn.sigmoid(i) * x
        return h, h

    lam = lam.astype(h.dtype)
    inputs = [jnp.moveaxis(z.astype(h.dtype), 1, 0) for z in (x, r, i)]
    last, hs = jax.lax.scan(token, h, (*inputs, first.T), reverse=reverse)
    return jnp.moveaxis(hs, 0, 1).astype(x.dtype), last


_FORMS = {"reference": _recurrence_reference, "xla": xla.recurrence}
_KERNELS = {"tpu": tpu.recurrence, "gpu": gpu.recurrence}


def rg_lru(
    x: Float[Array, "B T W"],
    r: Float[Array, "B T W"],
    i: Float[Array, "B T W"],
    lam: Float[Array, " W"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: RGLRUState | None = None,
    impl: str | None = None,
    reverse: bool = False,
    axis: str | None = None,
) -> tuple[Float[Array, "B T W"], RGLRUState]:
    """Runs the recurrence over T ≥ 1 tokens.

    Args:
        x: input.
        r, i: logits of the recurrence gate and of the input gate.
        lam: Λ, the decay's parameter.
        segment_ids: the document of each token (≥ 0); None for one document, the state's own.
        state: where an earlier call ended; None for the empty state.
        impl: None, "reference", "xla" or "pallas"; one asked for by name never gives way to
            another.
        reverse: runs from the last token to the first, for encoders: a document then begins at its
            last token, and the state is that of the first token.
        axis: inside `jax.shard_map`, the mesh axis that T is spread over (`latte.ops.context`): a
            part begins where those before it end, and the state returned is that of the part.

    Returns:
        h in x's dtype, and the state after the last token (the first one under `reverse`).

    Raises:
        ValueError: there is no implementation called `impl`, or T is spread and runs in reverse.
    """
    batch, length, width = x.shape
    # One token needs no kernel, and kernels have no float64.
    fits = length > 1 and x.dtype in (jnp.bfloat16, jnp.float32)
    recurrence = choose("rg_lru", impl, _FORMS, _KERNELS, fits=fits)
    dtype = accumulator(x.dtype)
    if state is None:
        state = empty_state(batch, width, dtype)
    if axis is not None:
        if reverse:
            raise ValueError("rg_lru has no form for rows spread over devices in reverse")
        state = _state_before((x, r, i, lam), segment_ids, state, impl, axis)
    ids = jnp.flip(segment_ids, 1) if reverse and segment_ids is not None else segment_ids
    runs = number_runs(ids, state.segment, length)
    first = jnp.flip(runs.first, 1) if reverse else runs.first
    h, last = recurrence(x, r, i, lam, first, state.h.astype(dtype), reverse)
    return h, RGLRUState(last, runs.last)


class _Part(NamedTuple):
    """A part read apart: the state after it, and the log of its decay of what came before."""

    state: RGLRUState
    log_decay: Float[Array, "B W"]


def _merge(left: _Part, right: _Part) -> _Part:
    """The part that two neighbours make."""
    one = (left.state.segment == right.state.segment)[:, None]
    h = right.state.h + jnp.where(one, jnp.exp(right.log_decay) * left.state.h, 0)
    decay = jnp.where(one, left.log_decay, 0) + right.log_decay
    return _Part(RGLRUState(h, right.state.segment), decay)


def _state_before(
    arrays: tuple[Array, Array, Array, Array],
    segment_ids: Int[Array, "B T"] | None,
    state: RGLRUState,
    impl: str | None,
    axis: str,
) -> RGLRUState:
    """The state before each device's part of a row that begins at `state`."""
    _, r, _, lam = arrays
    ids = context.numbered(segment_ids)
    own = (ids == ids[:, -1:])[..., None]
    wide = state.h.dtype
    logs = jnp.where(own, log_decay(r.astype(wide), lam.astype(wide)), 0)
    nothing = jnp.zeros_like(state.h)
    # A part that goes on in a document has no first token of it: its multiplier is not 1.
    before = RGLRUState(nothing, context.from_left(ids[:, -1], axis, state.segment))
    after = rg_lru(*arrays, segment_ids=ids, state=before, impl=impl)[1]
    part = _Part(after, jnp.sum(logs, axis=1))
    empty = _Part(before._replace(segment=jnp.full_like(before.segment, EMPTY)), nothing)
    return context.before(part, _merge, axis, empty, empty._replace(state=state)).state


def reference(
    x: Float[Array, "B T W"],
    r: Float[Array, "B T W"],
    i: Float[Array, "B T W"],
    lam: Float[Array, " W"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: RGLRUState | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "B T W"], RGLRUState]:
    """The definition: one token after another."""
    return rg_lru(
        x, r, i, lam, segment_ids=segment_ids, state=state, impl="reference", reverse=reverse
    )
