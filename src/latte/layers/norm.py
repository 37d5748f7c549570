"""Normalisation over channels, in float32."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_EPSILON = 1e-6


class RMSNorm(eqx.Module):
    """x / rms(x) · g (Zhang and Sennrich, 2019)."""

    scale: Float[Array, " D"]

    def __init__(self, width: int):
        self.scale = jnp.ones(width)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(self.scale.dtype)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + _EPSILON) * self.scale).astype(x.dtype)


class LayerNorm(eqx.Module):
    """(x − mean) / deviation · g + b (Ba et al., 2016)."""

    scale: Float[Array, " D"]
    bias: Float[Array, " D"]

    def __init__(self, width: int):
        self.scale = jnp.ones(width)
        self.bias = jnp.zeros(width)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(self.scale.dtype)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(variance + _EPSILON) * self.scale + self.bias
        return y.astype(x.dtype)


def make_norm(kind: Literal["layer", "rms"], width: int) -> RMSNorm | LayerNorm:
    """The norm that a config names."""
    return RMSNorm(width) if kind == "rms" else LayerNorm(width)
