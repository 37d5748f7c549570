"""What queries and keys are made from: the input itself, its convolution, or an RG-LRU of it."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from latte.layers.linear import BlockLinear
from latte.layers.mixer import Mixer, Place
from latte.layers.norm import RMSNorm
from latte.mesh import run_op
from latte.ops.conv import ConvState, conv
from latte.ops.conv import empty_state as empty_conv_state
from latte.ops.rg_lru import RGLRUState, rg_lru
from latte.ops.rg_lru import empty_state as empty_rg_lru_state

_SLOWEST, _FASTEST = 0.999, 0.9
"""Range of the RG-LRU's decays at a fully open gate when training starts (De et al., 2024)."""


class Identity(Mixer):
    """The input itself: Latte as it stands in equation 10."""

    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: PyTree | None = None
    ) -> tuple[Float[Array, "B T D"], PyTree]:
        return x, state

    def empty_state(self, batch: int, room: int) -> None:
        return None


class Conv(Mixer):
    """A depthwise convolution of K taps (equation 18), centred for encoders."""

    taps: Float[Array, "K D"]
    causal: bool = eqx.field(static=True)

    def __init__(self, width: int, size: int, *, causal: bool, key: PRNGKeyArray):
        self.taps = jax.random.normal(key, (size, width)) * size**-0.5
        self.causal = causal

    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: ConvState | None = None
    ) -> tuple[Float[Array, "B T D"], ConvState | None]:
        op = partial(conv, causal=self.causal)
        y, state = run_op(op, (x, self.taps.astype(x.dtype)), place.segment_ids, state)
        return y, state if self.causal else None

    def empty_state(self, batch: int, room: int) -> ConvState:
        size, width = self.taps.shape
        return empty_conv_state(batch, width, taps=size)


class RGLRU(eqx.Module):
    """One direction of a real-gated linear recurrent unit (De et al., 2024)."""

    gate_decay: BlockLinear
    gate_input: BlockLinear
    lam: Float[Array, " D"]

    def __init__(self, width: int, groups: int, *, key: PRNGKeyArray):
        key_decay, key_input, key_lam = jax.random.split(key, 3)
        self.gate_decay = BlockLinear(width, groups, key=key_decay)
        self.gate_input = BlockLinear(width, groups, key=key_input)
        decay = jax.random.uniform(key_lam, (width,), minval=_FASTEST, maxval=_SLOWEST)
        self.lam = jnp.log(jnp.expm1(-jnp.log(decay) / 8))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        place: Place,
        state: RGLRUState | None,
        *,
        reverse: bool = False,
    ) -> tuple[Float[Array, "B T D"], RGLRUState | None]:
        arrays = x, self.gate_decay(x), self.gate_input(x), self.lam
        return run_op(partial(rg_lru, reverse=reverse), arrays, place.segment_ids, state)


class Recurrence(Mixer):
    """z = RMSNorm(RG-LRU(x)) (Latte-R); an encoder adds a second RG-LRU from the right."""

    forward: RGLRU
    backward: RGLRU | None
    norm: RMSNorm

    def __init__(self, width: int, groups: int, *, causal: bool, key: PRNGKeyArray):
        key_forward, key_backward = jax.random.split(key)
        self.forward = RGLRU(width, groups, key=key_forward)
        self.backward = None if causal else RGLRU(width, groups, key=key_backward)
        self.norm = RMSNorm(width)

    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: RGLRUState | None = None
    ) -> tuple[Float[Array, "B T D"], RGLRUState | None]:
        y, state = self.forward(x, place, state)
        if self.backward is None:
            return self.norm(y), state
        return self.norm(y + self.backward(x, place, None, reverse=True)[0]), None

    def empty_state(self, batch: int, room: int) -> RGLRUState:
        return empty_rg_lru_state(batch, self.forward.lam.shape[0])
