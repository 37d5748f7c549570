"""Algebra shared by the chunked forms: cutting a sequence into chunks and putting it together."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def split(x: Float[Array, "B T H X"], chunk: int, fill: float = 0.0) -> Float[Array, "n B H C X"]:
    """Cuts a sequence into chunks and brings heads before time; the last chunk is filled up."""
    batch, length, heads, size = x.shape
    missing = -length % chunk
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=fill)
    return x.reshape(batch, -1, chunk, heads, size).transpose(1, 0, 3, 2, 4)


def join(x: Float[Array, "n B H C X"], length: int) -> Float[Array, "B T H X"]:
    """The inverse of `split`."""
    count, batch, heads, chunk, size = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, count * chunk, heads, size)[:, :length]


def split_runs(run: Int[Array, "B T"], chunk: int) -> Int[Array, "n B C"]:
    """Cuts run numbers into chunks; what fills the last chunk belongs to the last document."""
    batch, length = run.shape
    run = jnp.pad(run, ((0, 0), (0, -length % chunk)), mode="edge")
    return run.reshape(batch, -1, chunk).transpose(1, 0, 2)


def visible(run_t: Int[Array, "B C"], run_s: Int[Array, "B S"]) -> Bool[Array, "B 1 C S"]:
    """Which pairs of tokens belong to one document."""
    return (run_t[:, :, None] == run_s[:, None, :])[:, None]


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The type of states and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def products(dtype: jnp.dtype) -> Callable[..., Array]:
    """An einsum whose operands are rounded to `dtype` and whose sums are kept in its accumulator.

    float32 operands are multiplied in full: the matrix units' shorter passes would lose what the
    caller asked for.
    """
    precision = None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST

    def einsum(subscripts: str, *operands: Array) -> Array:
        rounded = [operand.astype(dtype) for operand in operands]
        return jnp.einsum(
            subscripts, *rounded, precision=precision, preferred_element_type=accumulator(dtype)
        )

    return einsum
