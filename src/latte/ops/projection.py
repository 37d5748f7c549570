"""Matrix products with parameters: operands in the activations' type, gradients in float32.

Parameters are float32 and activations may be bfloat16. The parameter's gradient is the float32 sum
itself, where differentiating a cast would round it to the activations' type first.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from latte.ops.chunk import accumulator
from latte.ops.dispatch import by_platform


@jax.custom_vjp
def project(
    x: Float[Array, "*rows in"], weight: Float[Array, "in out"]
) -> Float[Array, "*rows out"]:
    """x W, in the type of x."""
    return x @ weight.astype(x.dtype)


def _forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return project(x, weight), (x, weight)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, weight = saved
    dx = jnp.einsum("...o,io->...i", dy, weight.astype(x.dtype))
    dweight = by_platform(_correlate, x, dy, cpu=_correlate_flat)
    return dx, dweight.astype(weight.dtype)


def _correlate(x: Array, dy: Array) -> Array:
    """The weight's gradient, over rows as they are: their axes may be spread over devices."""
    rows = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(
        x, dy, ((rows, rows), ((), ())), preferred_element_type=accumulator(x.dtype)
    )


def _correlate_flat(x: Array, dy: Array) -> Array:
    """The same over one axis of rows, which spares XLA's CPU back end a transposed copy."""
    return _correlate(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))


project.defvjp(_forward, _backward)
