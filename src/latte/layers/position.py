"""Where a token stands: rotations (RoPE and VAPOR) and sinusoids. Positions count from 0 in each
document, so that a packed row and a document alone give the same numbers."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "B T H D"],
    positions: Int[Array, "B T"],
    theta: float,
    *,
    back: bool = False,
) -> Float[Array, "B T H D"]:
    """Rotates pair i, (x_i, x_{i+D/2}), by position · θ^(−2i/D); `back` turns the other way.

    On queries and keys this is RoPE (Su et al., 2024). VAPOR (Latte v1, equation 22) turns values
    back by their own position and outputs forward by theirs, so that a value arrives turned by its
    distance; its R is the block-diagonal rotation of RoPE. Angles are float32.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(-angles if back else angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1).astype(x.dtype)


def sinusoids(
    positions: Int[Array, "B T"], width: int, theta: float
) -> Float[Array, "B T {width}"]:
    """Fixed position vectors (Vaswani et al., 2017): sines, then cosines."""
    half = width // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
