"""Depthwise convolution as K shifted sums, compiled by XLA on anything.

K is small, so shifting and adding costs one pass over the input, while a grouped convolution would
run one channel at a time on most hardware and could not mask documents.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


# Kept whole, the masked inputs of the K taps would be K copies of the input in float32.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def convolve(
    inputs: Float[Array, "B S W"],
    runs: Int[Array, "B S"],
    weight: Float[Array, "K W"],
    ahead: int,
) -> Float[Array, "B T W"]:
    """What the definition computes, from the inputs that its reference describes."""
    taps = weight.shape[0]
    length = inputs.shape[1] - taps + 1

    def lag(z, j):
        return jax.lax.slice_in_dim(z, taps - 1 - j, taps - 1 - j + length, axis=1)

    own = lag(runs, ahead)
    y = jnp.zeros((), weight.dtype)
    for j in range(taps):
        same = (lag(runs, j) == own)[..., None]
        y = y + weight[j] * jnp.where(same, lag(inputs, j), 0)
    return y
