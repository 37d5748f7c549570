"""The two gates of the RG-LRU that its decay fixes, with a derivative that is finite everywhere.

With ν = log(−log a) = log 8 + log softplus(Λ) + log σ(r), all derivatives go through ν, because its
own are bounded (∂ν/∂r = σ(−r), ∂ν/∂Λ = σ(Λ)/softplus(Λ) ∈ (0, 1]) while those through a are not:
m = √(1−a²) has an infinite slope at a = 1, but ∂m/∂ν = −a² log a / m falls to 0 there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DECAY_SCALE = 8.0
"""log a at an open gate, as a multiple of −softplus(Λ)."""


def log_decay(r: Float[Array, "*shape"], lam: Float[Array, " W"]) -> Float[Array, "*shape"]:
    """log a = −8 softplus(Λ) σ(r)."""
    return -DECAY_SCALE * jax.nn.softplus(lam) * jax.nn.sigmoid(r)


def lam_slope(lam: Float[Array, " W"]) -> Float[Array, " W"]:
    """∂ν/∂Λ = σ(Λ)/softplus(Λ); below −40 it is 1 to the last digit, and both factors vanish."""
    lam = jnp.maximum(lam, -40.0)
    return jax.nn.sigmoid(lam) / jax.nn.softplus(lam)


def multiplier_of(log_a: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """m = √(1−a²), without its derivative."""
    return jnp.sqrt(-jnp.expm1(2 * log_a))


def multiplier_slope(
    log_a: Float[Array, "*shape"], m: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """∂m/∂ν = −a² log a / m, 0 in the limit a = 1."""
    return jnp.where(m > 0, -jnp.exp(2 * log_a) * log_a / jnp.where(m > 0, m, 1), 0)


@jax.custom_jvp
def multiplier(r: Float[Array, "*shape"], lam: Float[Array, " W"]) -> Float[Array, "*shape"]:
    """m = √(1−a²), which keeps the size of the state when a is near 1."""
    return multiplier_of(log_decay(r, lam))


@multiplier.defjvp
def _multiplier_jvp(primals, tangents):
    r, lam = primals
    dr, dlam = tangents
    log_a = log_decay(r, lam)
    m = multiplier_of(log_a)
    dnu = jax.nn.sigmoid(-r) * dr + lam_slope(lam) * dlam
    return m, multiplier_slope(log_a, m) * dnu
