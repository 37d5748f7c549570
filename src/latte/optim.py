"""AdamW with decoupled decay, its learning-rate schedules, and the rule for bad steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from latte.config import OptimConfig

_SPIKE_MEMORY = 0.98
"""Share of the running mean of gradient norms that a step keeps."""
_SPIKE_AFTER = 50
"""Applied steps before a gradient norm can count as a spike."""


def learning_rate(config: OptimConfig, steps: int, step: Int[Array, ""]) -> Float[Array, ""]:
    """The rate of a step, counted from 0, of a run of `steps`.

    It rises linearly over the warm-up, then falls to `final` times the peak: as a cosine, as a
    line, or (wsd) as a line over the last `decay` of the steps only.
    """
    done = (step + 1).astype(jnp.float32)
    rising = done / max(config.warmup, 1)
    start = config.warmup
    if config.schedule == "wsd":
        start = max(steps - round(config.decay * steps), config.warmup)
    progress = jnp.clip((done - start) / max(steps - start, 1), 0, 1)
    falling = {
        "cosine": (1 + jnp.cos(jnp.pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "constant": jnp.ones_like(progress),
    }[config.schedule]
    share = config.final + (1 - config.final) * falling
    return config.lr * jnp.where(done < config.warmup, rising, share)


def decays(model: PyTree) -> PyTree:
    """Which leaves weight decay pulls on: matrices, which every layer names `weight`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].name == "weight", model)


class OptimState(NamedTuple):
    """Adam's moments, and what the rule for bad steps remembers.

    norm: running mean of gradient norms over applied steps.
    applied: steps that changed the model.
    skipped: skipped steps since the last applied one.
    """

    adam: Any
    norm: Float[Array, ""]
    applied: Int[Array, ""]
    skipped: Int[Array, ""]


def _adamw(config: OptimConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def init(config: OptimConfig, model: PyTree) -> OptimState:
    """The state before the first step."""
    adam = _adamw(config).init(model)
    return OptimState(adam, jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


class Update(NamedTuple):
    """What became of one step."""

    model: PyTree
    state: OptimState
    grad_norm: Float[Array, ""]
    applied: Bool[Array, ""]


def update(
    config: OptimConfig,
    model: PyTree,
    grads: PyTree,
    state: OptimState,
    *,
    rate: Float[Array, ""],
    loss: Float[Array, ""],
) -> Update:
    """Clips and applies the gradients, or leaves the model as it is where the step is bad.

    A step is bad when its loss or gradient norm is not finite, or when the norm is `spike` times
    the running mean. This is decided on the device, so that the host need not wait for it.
    """
    norm = optax.tree.norm(grads)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if config.spike:
        good &= (state.applied < _SPIKE_AFTER) | (norm < config.spike * state.norm)
    scale = jnp.minimum(1, config.clip / jnp.maximum(norm, 1e-12)) if config.clip else 1.0
    grads = jax.tree.map(lambda grad: grad * scale, grads)
    direction, adam = _adamw(config).update(grads, state.adam, model)
    stepped = jax.tree.map(lambda x, d: x - rate * d, model, direction)
    memory = jnp.minimum(_SPIKE_MEMORY, state.applied / (state.applied + 1))
    mean = memory * state.norm + (1 - memory) * norm
    after = OptimState(adam, mean, state.applied + 1, jnp.zeros_like(state.skipped))
    before = state._replace(skipped=state.skipped + 1)
    model, state = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), (stepped, after), (model, before)
    )
    return Update(model, state, norm, good)
