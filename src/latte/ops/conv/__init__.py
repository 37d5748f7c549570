"""Depthwise convolution over time that never reaches into another document.

    y_t = bias + Σ_{j<K} weight_j x_{t−j}

with one weight a tap and channel, and x = 0 outside the document. `causal=False` centres the taps,
y_t = bias + Σ_j weight_j x_{t+c−j} with c = ⌊(K−1)/2⌋: an even K has its odd tap in the past.
Sums are kept in float32 (float64 where the inputs are float64).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from latte.ops import context
from latte.ops.chunk import accumulator
from latte.ops.conv import xla
from latte.ops.dispatch import choose
from latte.ops.segments import EMPTY, number_runs


class ConvState(NamedTuple):
    """The last K−1 inputs, 0 where they are not of the last one's document, and its segment id."""

    inputs: Float[Array, "B K-1 W"]
    segment: Int[Array, " B"]


def empty_state(batch: int, width: int, taps: int, dtype: DTypeLike = jnp.float32) -> ConvState:
    """The state before any token; `dtype` is that of the inputs."""
    inputs = jnp.zeros((batch, taps - 1, width), dtype)
    return ConvState(inputs, jnp.full((batch,), EMPTY, jnp.int32))


def _convolve_reference(
    inputs: Float[Array, "B S W"],
    runs: Int[Array, "B S"],
    weight: Float[Array, "K W"],
    ahead: int,
) -> Float[Array, "B T W"]:
    """One token after another.

    `inputs` are the T tokens and the K−1 neighbours that the taps reach, `ahead` of them after the
    last token and the others before the first; `runs` number their documents.
    """
    taps = weight.shape[0]

    def token(t):
        window = jax.lax.dynamic_slice_in_dim(inputs, t, taps, 1)
        run = jax.lax.dynamic_slice_in_dim(runs, t, taps, 1)
        own = run[:, taps - 1 - ahead, None]
        x = jnp.where((run == own)[..., None], window, 0)
        return jnp.sum(weight[::-1] * x, axis=1)

    return jnp.moveaxis(jax.lax.map(token, jnp.arange(inputs.shape[1] - taps + 1)), 0, 1)


_CONVOLVE = {"reference": _convolve_reference, "xla": xla.convolve}


def conv(
    x: Float[Array, "B T W"],
    weight: Float[Array, "K W"],
    bias: Float[Array, " W"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: ConvState | None = None,
    impl: str | None = None,
    causal: bool = True,
    axis: str | None = None,
) -> tuple[Float[Array, "B T W"], ConvState]:
    """Convolves T ≥ 1 tokens with K ≥ 1 taps.

    Args:
        x: input.
        weight: tap j is applied to the input j tokens back.
        bias: added to every output.
        segment_ids: the document of each token (≥ 0); None for one document, the state's own.
        state: where an earlier call ended; None for the empty state.
        impl: None, "reference" or "xla"; one asked for by name never gives way to another.
        causal: False centres the taps, for encoders, which see whole rows and keep no state.
        axis: inside `jax.shard_map`, the mesh axis that T is spread over (`latte.ops.context`): a
            part begins where those before it end, and the state returned is that of the part.

    Returns:
        y in x's dtype, and the state after the last token (the empty one where not causal).

    Raises:
        ValueError: there is no implementation called `impl`, a state is given or T is spread where
            not causal, or a part of T is shorter than the taps reach.
    """
    convolve = choose("conv", impl, _CONVOLVE)
    if state is not None and not causal:
        raise ValueError("conv keeps no state where it is not causal; leave out `state`")
    (batch, length, width), taps = x.shape, weight.shape[0]
    dtype = accumulator(x.dtype)
    ahead = 0 if causal else (taps - 1) // 2
    if state is None:
        state = empty_state(batch, width, taps, x.dtype)
    if axis is not None:
        state = _state_before(x, context.numbered(segment_ids), state, causal, axis)
    runs = number_runs(segment_ids, state.segment, length)

    # Run 0 is the state's own document; nothing after the last token is of any.
    inputs = jnp.concatenate([state.inputs[:, ahead:].astype(x.dtype), x], axis=1)
    numbers = jnp.pad(runs.run, ((0, 0), (taps - 1 - ahead, 0)))
    y = convolve(
        jnp.pad(inputs, ((0, 0), (0, ahead), (0, 0))),
        jnp.pad(numbers, ((0, 0), (0, ahead)), constant_values=-1),
        weight.astype(dtype),
        ahead,
    )
    if bias is not None:
        y = y + bias.astype(dtype)
    if not causal:
        return y.astype(x.dtype), state
    own = numbers[:, length:] == runs.run[:, -1:]
    state = ConvState(jnp.where(own[..., None], inputs[:, length:], 0), runs.last)
    return y.astype(x.dtype), state


def _state_before(
    x: Float[Array, "B T W"],
    segment_ids: Int[Array, "B T"],
    state: ConvState,
    causal: bool,
    axis: str,
) -> ConvState:
    """The state before each device's part of a row that begins at `state`."""
    reach = state.inputs.shape[1]
    if not causal:
        raise ValueError("conv has no form for rows spread over devices where it is not causal")
    if x.shape[1] < reach:
        raise ValueError(f"conv reaches {reach} tokens back, over a part of {x.shape[1]}")
    own = segment_ids[:, x.shape[1] - reach :] == segment_ids[:, -1:]
    inputs = jnp.where(own[..., None], x[:, x.shape[1] - reach :], 0).astype(state.inputs.dtype)
    return context.from_left(ConvState(inputs, segment_ids[:, -1]), axis, state)


def reference(
    x: Float[Array, "B T W"],
    weight: Float[Array, "K W"],
    bias: Float[Array, " W"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    state: ConvState | None = None,
    causal: bool = True,
) -> tuple[Float[Array, "B T W"], ConvState]:
    """The definition: one token after another."""
    return conv(
        x, weight, bias, segment_ids=segment_ids, state=state, impl="reference", causal=causal
    )
