"""Projections."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from latte.ops.projection import project

PRODUCT = "product"
"""Name of what projections give, for a backward pass that keeps it (rematerialisation cannot look
into a product that has a derivative of its own)."""


class Linear(eqx.Module):
    """y = x W, with W in float32 and the product in the type of x."""

    weight: Float[Array, "in out"]

    def __init__(self, size_in: int, size_out: int, *, key: PRNGKeyArray, gain: float = 1.0):
        """Draws W from a normal distribution with standard deviation gain / √size_in."""
        self.weight = jax.random.normal(key, (size_in, size_out)) * (gain * size_in**-0.5)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return checkpoint_name(project(x, self.weight), PRODUCT)


class BlockLinear(eqx.Module):
    """y = x W + b with a block-diagonal W: each of G groups of channels mixes within itself."""

    weight: Float[Array, "G in out"]
    bias: Float[Array, " width"]

    def __init__(self, width: int, groups: int, *, key: PRNGKeyArray):
        size = width // groups
        self.weight = jax.random.normal(key, (groups, size, size)) * size**-0.5
        self.bias = jnp.zeros(width)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        groups = x.reshape(*x.shape[:-1], self.weight.shape[0], -1)
        y = jnp.einsum("...gi,gio->...go", groups, self.weight.astype(x.dtype))
        y = checkpoint_name(y, PRODUCT)
        return y.reshape(x.shape) + self.bias.astype(x.dtype)


def split_heads(x: Float[Array, "B T X"], heads: int) -> Float[Array, "B T H Y"]:
    """Channels into heads."""
    return x.reshape(*x.shape[:-1], heads, -1)


def join_heads(x: Float[Array, "B T H Y"]) -> Float[Array, "B T X"]:
    """Heads into channels."""
    return x.reshape(*x.shape[:-2], -1)
