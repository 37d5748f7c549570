"""Softmax attention as a layer: full, windowed, and R-SWA, whose queries and keys are recurrent."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from latte.layers.linear import Linear, join_heads, split_heads
from latte.layers.mixer import Mixer, Place
from latte.layers.position import rotate
from latte.mesh import run_op
from latte.ops.attention import AttentionState, attention
from latte.ops.attention import empty_state as empty_attention_state


class AttentionLayerState(NamedTuple):
    """Of what the queries and keys are made from, and of the attention."""

    source: Any
    attention: AttentionState


class Attention(Mixer):
    """Queries and keys from `source` of the input, values from the input."""

    source: Mixer
    project_q: Linear
    project_k: Linear
    project_v: Linear
    project_out: Linear
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    theta: float | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)

    def __init__(
        self,
        source: Mixer,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        key_size: int,
        window: int | None,
        theta: float | None,
        causal: bool,
        gain_out: float,
        key: PRNGKeyArray,
    ):
        """`key_size` is the width of a head's queries and keys; theta None rotates nothing."""
        keys = jax.random.split(key, 4)
        size = width // heads
        self.source = source
        self.project_q = Linear(width, heads * key_size, key=keys[0])
        self.project_k = Linear(width, kv_heads * key_size, key=keys[1])
        self.project_v = Linear(width, kv_heads * size, key=keys[2])
        self.project_out = Linear(width, width, key=keys[3], gain=gain_out)
        self.heads, self.kv_heads = heads, kv_heads
        self.window, self.theta, self.causal = window, theta, causal

    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: AttentionLayerState | None = None
    ) -> tuple[Float[Array, "B T D"], AttentionLayerState | None]:
        source, past = (None, None) if state is None else state
        z, source = self.source(x, place, source)
        q = split_heads(self.project_q(z), self.heads)
        k = split_heads(self.project_k(z), self.kv_heads)
        v = split_heads(self.project_v(x), self.kv_heads)
        if self.theta is not None:
            q, k = (rotate(a, place.positions, self.theta) for a in (q, k))
        op = partial(attention, window=self._window())
        y, past = run_op(op, (q, k, v), place.segment_ids, past)
        state = AttentionLayerState(source, past) if self.causal else None
        return self.project_out(join_heads(y)), state

    def _window(self) -> int | tuple[int | None, int | None] | None:
        if self.causal:
            return self.window
        reach = None if self.window is None else self.window - 1
        return reach, reach

    def empty_state(self, batch: int, room: int) -> AttentionLayerState:
        return AttentionLayerState(
            self.source.empty_state(batch, room),
            empty_attention_state(
                batch,
                room if self.window is None else self.window - 1,
                self.kv_heads,
                self.project_k.weight.shape[1] // self.kv_heads,
                self.project_v.weight.shape[1] // self.kv_heads,
            ),
        )
