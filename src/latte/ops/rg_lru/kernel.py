"""What the kernels of both accelerators share: the gates, token by token, and padding.

Exponentials are powers of two, which is what both kinds of hardware have, and every quotient is a
reciprocal or a reciprocal square root of a number away from 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from latte.ops.rg_lru.gates import DECAY_SCALE, lam_slope

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
CLOSED = -2000.0
"""log₂ a at a document's first token: 2 to this power is 0."""
IDLE = -1e30
"""The logit r of a token that changes nothing: a = 1 and m = 0."""


class Functions(NamedTuple):
    """What the hardware computes in the fewest steps, on ordinary numbers.

    2^z for z ≤ 120 (0 far below); 1/z and 1/√z for 1e-30 ≤ z ≤ 1e37; √z for 0 ≤ z ≤ 1; x y + z.
    saturates: 2^z may go to infinity, and the reciprocal of that is 0.
    """

    exp2: Callable[[Array], Array]
    reciprocal: Callable[[Array], Array]
    rsqrt: Callable[[Array], Array]
    sqrt: Callable[[Array], Array]
    multiply_add: Callable[[Array, Array, Array], Array]
    saturates: bool = False


PLAIN = Functions(
    jnp.exp2, lambda z: 1 / z, jax.lax.rsqrt, jnp.sqrt, lambda x, y, z: x * y + z, saturates=True
)
"""The same in plain JAX."""


def decay_exponent(lam: Float[Array, " W"]) -> Float[Array, " W"]:
    """log₂ a at an open gate, −8 softplus(Λ) / log 2, in float32."""
    return -DECAY_SCALE * LOG2E * jax.nn.softplus(lam.astype(jnp.float32))


def lam_gradient(dnu: Float[Array, " W"], lam: Float[Array, " W"]) -> Float[Array, " W"]:
    """∂L/∂Λ from the sum of ∂L/∂ν over batch and time."""
    return (dnu * lam_slope(lam.astype(jnp.float32))).astype(lam.dtype)


def limit_of(first: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The largest log₂ a of tokens: CLOSED at first ones."""
    return jnp.where(first, jnp.float32(CLOSED), jnp.float32(0))


def decay(
    r: Float[Array, "*shape"],
    exponent: Float[Array, "..."],
    limit: Float[Array, "..."],
    math: Functions,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """log₂ a and a, from the gate's logit in float32.

    `exponent` is that of the channel, and `limit` is CLOSED at first tokens and 0 elsewhere.
    """
    log_a = jnp.minimum(exponent * _sigmoid(r, math), limit)
    return log_a, math.exp2(log_a)


def step(
    x: Float[Array, "*shape"],
    r: Float[Array, "*shape"],
    i: Float[Array, "*shape"],
    exponent: Float[Array, "..."],
    limit: Float[Array, "..."],
    math: Functions,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """a and b = m σ(i) x of h' = a h + b, as one token changes the state; all in float32."""
    log_a, a = decay(r, exponent, limit, math)
    m = math.sqrt(_one_minus_square(log_a, a, math))
    return a, m * _sigmoid(i, math) * x


class Factors(NamedTuple):
    """What turns G = ∂L/∂h into the gradients of one token."""

    of_x: Float[Array, "*shape"]
    of_nu: Float[Array, "*shape"]
    of_r: Float[Array, "*shape"]  # of ∂L/∂ν
    of_i: Float[Array, "*shape"]


def factors(
    x: Float[Array, "*shape"],
    r: Float[Array, "*shape"],
    i: Float[Array, "*shape"],
    before: Float[Array, "*shape"],
    exponent: Float[Array, "..."],
    limit: Float[Array, "..."],
    math: Functions,
) -> tuple[Float[Array, "*shape"], Factors]:
    """a, and ∂h/∂x, ∂h/∂ν, ∂ν/∂r and ∂h/∂i of one token, given h before it; all in float32.

    ∂h/∂ν = a log a (h_{t−1} − a σ(i) x / m), with ∂m/∂ν = −a² log a / m as in gates.py; it is 0
    where a is 0 or 1.
    """
    r_open, r_shut = _sigmoids(r, math)
    i_open, i_shut = _sigmoids(i, math)
    log_a = jnp.minimum(exponent * r_open, limit)
    a = math.exp2(log_a)
    square = _one_minus_square(log_a, a, math)
    inverse_m = math.rsqrt(jnp.maximum(square, 1e-30))
    gated = i_open * x
    of_x = square * inverse_m * i_open
    inner = math.multiply_add(-a * inverse_m, gated, before)
    return a, Factors(of_x, LN2 * log_a * a * inner, r_shut, of_x * x * i_shut)


def _sigmoid(z, math):
    """σ(z) to its last digits."""
    power = z * -LOG2E
    return math.reciprocal(1 + math.exp2(power if math.saturates else jnp.minimum(power, 120.0)))


def _sigmoids(z, math):
    """σ(z) and σ(−z), each to its last digits; nothing overflows."""
    e = math.exp2(jnp.minimum(z * -LOG2E, 120.0))
    sigmoid = math.reciprocal(1 + e)
    return sigmoid, e * sigmoid


def _one_minus_square(log_a, a, math):
    """1 − a²; where a is near 1, the series of −expm1(z) with z = 2 log a."""
    c = 2 * LN2  # z = c log₂ a
    one = jnp.ones_like(a)
    series = math.multiply_add(log_a, one * (c**2 / 6), one * (c / 2))
    series = math.multiply_add(series, log_a, one)
    return jnp.where(log_a > -0.02, series * (log_a * -c), math.multiply_add(-a, a, one))


def pack_bits(flags: Bool[Array, "... n"]) -> Int[Array, "..."]:
    """n ≤ 32 flags as the low bits of an integer, the first flag lowest."""
    weights = jnp.left_shift(1, jnp.arange(flags.shape[-1], dtype=jnp.int32))
    return jnp.sum(jnp.where(flags, weights, 0), -1, dtype=jnp.int32)


def pad(z: Array, axis: int, size: int, fill: float = 0.0) -> Array:
    """z with `axis` filled up to `size`."""
    widths = [(0, size - n if k == axis else 0) for k, n in enumerate(z.shape)]
    return jnp.pad(z, widths, constant_values=fill) if size > z.shape[axis] else z
