"""Steps that are run twice, to find devices that compute wrongly without saying so.

A step is a pure function and one compiled program, so its two results are the same to the bit, or
some device is broken: that is rare, and ruins a run in silence.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from latte.checkpoint import fingerprints
from latte.errors import RunFailedError


def replay(step_function: Callable[..., tuple[PyTree, Any]], every: int) -> Callable:
    """A step (number, state, batch, …) → (state, report) of which each `every`-th is run twice.

    Args:
        step_function: (state, batch, …) → (state, report), which may use the state up.
        every: 0 runs no step twice.

    Raises:
        RunFailedError: when a replayed step gives two results.
    """

    def run(step: int, state: PyTree, *given: Any) -> tuple[PyTree, Any]:
        if not every or step % every:
            return step_function(state, *given)
        copy = _copy(state)
        first, report = step_function(state, *given)
        second, _ = step_function(copy, *given)
        sums = [fingerprints(_wide(tree)) for tree in (first, second)]
        wrong = sum(int(a) != int(b) for a, b in zip(*sums, strict=True))
        if wrong:
            raise RunFailedError(
                f"step {step} was run twice from the same state and gave two results ({wrong} of "
                f"{len(sums[0])} arrays differ): a device computes wrongly; take it out and run "
                "the same command again"
            )
        return first, report

    return run


@jax.jit
def _copy(state: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, state)


def _wide(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype.itemsize == 4]
