"""What kernels leave for their backward pass, by a name that `jax.checkpoint` may keep."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

KEPT = "kernel"
"""Keeping these spares the backward pass a second run of the forward kernel."""


def keep(results: PyTree) -> PyTree:
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), results)
