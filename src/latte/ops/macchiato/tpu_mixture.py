"""The mixture over a head's N + 1 states, as Mosaic kernels read it: q with time in lanes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from latte.ops.latte.tpu_chunk import Group, inverse
from latte.ops.macchiato.tpu_layout import Plan


class Mixture(NamedTuple):
    """Of the latents of a block of heads [C, block · N], and of their windows [C, block]."""

    latents: Any
    window: Any


def room(plan: Plan) -> Mixture:
    """Scratch in float32."""
    layout = plan.latte
    widths = layout.block * layout.latents, layout.block
    return Mixture(*(pltpu.VMEM((layout.chunk, width), jnp.float32) for width in widths))


def _softmax(plan: Plan, q: Any, head: int) -> Float[Array, "S C"]:
    logits = q[head * plan.states : (head + 1) * plan.states, :].astype(jnp.float32)
    weights = jnp.exp(logits - jnp.max(logits, axis=0, keepdims=True))
    return weights * inverse(jnp.sum(weights, axis=0, keepdims=True))


def _heads(group: Group) -> range:
    first = group.index * group.layout.group
    return range(first, first + group.layout.group)


def read(plan: Plan, q: Any, mixture: Mixture) -> None:
    """Writes softmax(q), time in rows."""
    windows = []
    for group in plan.latte.groups():
        weights = [_softmax(plan, q, head) for head in _heads(group)]
        windows += [p[:1] for p in weights]
        latents = jnp.concatenate([p[1:] for p in weights], axis=0)
        mixture.latents[:, group.latents] = latents.T
    mixture.window[...] = jnp.concatenate(windows, axis=0).T


def write_gradients(plan: Plan, q: Any, each: Mixture, dq: Any) -> None:
    """dq = p dp − p Σ p dp over the states, from `each` = p dp."""
    windows, parts = each.window[...].T, []
    for group in plan.latte.groups():
        latents = each.latents[:, group.latents].T
        for h, head in enumerate(_heads(group)):
            rows = jnp.concatenate([windows[head : head + 1], latents[group.rows(h)]], axis=0)
            p = _softmax(plan, q, head)
            parts.append(rows - p * jnp.sum(rows, axis=0, keepdims=True))
    dq[...] = jnp.concatenate(parts, axis=0).astype(dq.dtype)
