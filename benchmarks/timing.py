"""What benchmarks share: how a call is timed, and what the device gives at best."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIDE = 8192
_COPIED = 2**30


def milliseconds(function: Callable, *arguments: Any, calls: int) -> float:
    """Time of one of `calls` calls that are waited for together; the median of five such rounds,
    after one call that compiles and warms up."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * float(np.median(times))


def copy_rate(calls: int) -> float:
    """Bytes a second that a copy of 2 GB reads and writes."""
    x = jnp.ones(_COPIED, jnp.bfloat16)
    return 2e3 * x.nbytes / milliseconds(jax.jit(lambda x: x + 1), x, calls=calls)


def product_rate(calls: int) -> float:
    """FLOP/s of a product of two 8,192² bfloat16 matrices."""
    a = jnp.ones((_SIDE, _SIDE), jnp.bfloat16)
    return 2e3 * _SIDE**3 / milliseconds(jax.jit(jnp.matmul), a, a, calls=calls)
