"""What benchmarks share: how a call is timed, and what the device gives at best."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIDE = 8192
_COPIED = 2**30
_LONG = 0.3
"""Seconds a call from which on one says enough."""


def milliseconds(function: Callable, *arguments: Any, calls: int) -> float:
    """Time of one call of a function of JAX, as `median_ms` takes it."""
    out: Any = None

    def call() -> None:
        nonlocal out
        out = function(*arguments)

    return median_ms(call, lambda: jax.block_until_ready(out), calls)


def median_ms(call: Callable[[], None], wait: Callable[[], Any], calls: int) -> float:
    """Time of one of `calls` calls that are waited for together; the median of five such rounds,
    after two calls that compile and warm up. The second of these alone, where it takes long."""
    call()
    wait()
    if (first := _took(call, wait, 1)) > _LONG:
        return 1e3 * first
    return 1e3 * float(np.median([_took(call, wait, calls) for _ in range(5)]))


def _took(call: Callable[[], None], wait: Callable[[], Any], calls: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - start) / calls


def copy_rate(calls: int) -> float:
    """Bytes a second that a copy of 2 GB reads and writes."""
    x = jnp.ones(_COPIED, jnp.bfloat16)
    return 2e3 * x.nbytes / milliseconds(jax.jit(lambda x: x + 1), x, calls=calls)


def product_rate(calls: int) -> float:
    """FLOP/s of a product of two 8,192² bfloat16 matrices."""
    a = jnp.ones((_SIDE, _SIDE), jnp.bfloat16)
    return 2e3 * _SIDE**3 / milliseconds(jax.jit(jnp.matmul), a, a, calls=calls)
