"""Latte as a layer: Latte, Latte-Conv, Latte-R, and each of them with a sliding window."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from latte.layers.linear import Linear, join_heads, split_heads
from latte.layers.mixer import Mixer, Place, stateless
from latte.layers.position import rotate
from latte.mesh import run_op
from latte.ops.attention import empty_state as empty_attention_state
from latte.ops.latte import LatteState, latte
from latte.ops.latte import bidirectional as latte_bidirectional
from latte.ops.latte import empty_state as empty_latte_state
from latte.ops.macchiato import MacchiatoState, macchiato
from latte.ops.macchiato import bidirectional as macchiato_bidirectional


class LatteLayerState(NamedTuple):
    """Of what the logits are made from, and of the op."""

    source: Any
    op: Any


class _OfLatents(Mixer):
    """What both layers are: latents whose logits come from `source` of the input."""

    source: Mixer
    project_q: Linear
    project_k: Linear
    heads: int = eqx.field(static=True)

    def _logits(
        self, x: Float[Array, "B T D"], place: Place, state: Any = None
    ) -> tuple[Float[Array, "B T H L"], Float[Array, "B T H N"], Any]:
        """Query and key logits, and the source's state."""
        z, state = self.source(x, place, state)
        q, k = (split_heads(project(z), self.heads) for project in (self.project_q, self.project_k))
        return q, k, state

    def latents(self, x: Float[Array, "B T D"], place: Place) -> Float[Array, "B T H L"]:
        """p(l|t) of a sequence; of Latte-Macchiato the window's state first."""
        q, _, _ = self._logits(x, place)
        return jax.nn.softmax(q.astype(jnp.float32), axis=-1)

    def _empty_latents(self, batch: int, size: int) -> LatteState:
        """The op's state of `size` values a head before any token."""
        latents = self.project_k.weight.shape[1] // self.heads
        return empty_latte_state(batch, self.heads, latents, size)


class Latte(_OfLatents):
    """Latent attention: logits from `source` of the input, values from the input (equation 19)."""

    project_v: Linear
    project_out: Linear
    theta: float | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)

    def __init__(
        self,
        source: Mixer,
        width: int,
        *,
        heads: int,
        latents: int,
        theta: float | None,
        causal: bool,
        gain_out: float,
        key: PRNGKeyArray,
    ):
        """`latents` a head; theta is VAPOR's, None for values that are not rotated."""
        keys = jax.random.split(key, 4)
        self.source = source
        self.project_q = Linear(width, heads * latents, key=keys[0])
        self.project_k = Linear(width, heads * latents, key=keys[1])
        self.project_v = Linear(width, width, key=keys[2])
        self.project_out = Linear(width, width, key=keys[3], gain=gain_out)
        self.heads, self.theta, self.causal = heads, theta, causal

    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: LatteLayerState | None = None
    ) -> tuple[Float[Array, "B T D"], LatteLayerState | None]:
        source, op = (None, None) if state is None else state
        q, k, source = self._logits(x, place, source)
        v = split_heads(self.project_v(x), self.heads)
        if self.theta is not None:
            v = rotate(v, place.positions, self.theta, back=True)
        mix = latte if self.causal else stateless(latte_bidirectional)
        y, op = run_op(mix, (q, k, v), place.segment_ids, op)
        if self.theta is not None:
            y = rotate(y, place.positions, self.theta)
        state = LatteLayerState(source, op) if self.causal else None
        return self.project_out(join_heads(y)), state

    def empty_state(self, batch: int, room: int) -> LatteLayerState:
        op = self._empty_latents(batch, self.project_v.weight.shape[1] // self.heads)
        return LatteLayerState(self.source.empty_state(batch, room), op)


class Macchiato(_OfLatents):
    """Latte-Macchiato: state 0 of the mixture is a sliding window (equations 15 to 17).

    The latents' logits come from `source` of the input; values, and the window's queries and keys,
    from the input.
    """

    project_v: Linear
    project_window_q: Linear
    project_window_k: Linear
    project_out: Linear
    kv_heads: int = eqx.field(static=True)
    window: int = eqx.field(static=True)
    theta: float | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)

    def __init__(
        self,
        source: Mixer,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        latents: int,
        window: int,
        theta: float | None,
        causal: bool,
        gain_out: float,
        key: PRNGKeyArray,
    ):
        """`latents` a head; theta is RoPE's on the window, None for none."""
        keys = jax.random.split(key, 6)
        size = width // heads
        self.source = source
        self.project_q = Linear(width, heads * (latents + 1), key=keys[0])
        self.project_k = Linear(width, heads * latents, key=keys[1])
        self.project_v = Linear(width, kv_heads * size, key=keys[2])
        self.project_window_q = Linear(width, heads * size, key=keys[3])
        self.project_window_k = Linear(width, kv_heads * size, key=keys[4])
        self.project_out = Linear(width, width, key=keys[5], gain=gain_out)
        self.heads, self.kv_heads = heads, kv_heads
        self.window, self.theta, self.causal = window, theta, causal

    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: LatteLayerState | None = None
    ) -> tuple[Float[Array, "B T D"], LatteLayerState | None]:
        source, op = (None, None) if state is None else state
        q, k, source = self._logits(x, place, source)
        v = split_heads(self.project_v(x), self.kv_heads)
        qw = split_heads(self.project_window_q(x), self.heads)
        kw = split_heads(self.project_window_k(x), self.kv_heads)
        if self.theta is not None:
            qw, kw = (rotate(a, place.positions, self.theta) for a in (qw, kw))
        mix = macchiato if self.causal else stateless(macchiato_bidirectional)
        y, op = run_op(partial(mix, window=self.window), (q, k, v, qw, kw), place.segment_ids, op)
        state = LatteLayerState(source, op) if self.causal else None
        return self.project_out(join_heads(y)), state

    def empty_state(self, batch: int, room: int) -> LatteLayerState:
        size = self.project_window_q.weight.shape[1] // self.heads
        op = MacchiatoState(
            self._empty_latents(batch, size),
            empty_attention_state(batch, self.window - 1, self.kv_heads, size, size),
        )
        return LatteLayerState(self.source.empty_state(batch, room), op)
