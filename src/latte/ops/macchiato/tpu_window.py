"""The window within one chunk, as Mosaic kernels compute it.

A window of W keys reaches back into the last n = ⌈W / C⌉ chunks. The farthest of them is seen only
right of the diagonal and the chunk itself only left of it, so the two share one square of logits,
folded: for W ≤ C, all of the window. Parts of a chunk's weights are listed as (own chunk, the one
before it, …, the farthest), folded ones as (own and farthest, the one before, …).
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from latte.ops.latte.tpu_chunk import NT, dot, inverse, sums_across
from latte.ops.macchiato.tpu_layout import Plan


class Sight(NamedTuple):
    """Who sees whom through the window.

    own: left of the diagonal and on it, with tokens t in rows. turned: the same, s in rows.
    visible: of the folded parts, the pairs that the window and the documents allow.
    """

    own: Bool[Array, "C C"]
    turned: Bool[Array, "C C"]
    visible: list[Bool[Array, "C C"]]


def sight(plan: Plan, runs: Any, past: tuple) -> Sight:
    """From run numbers: a block [2, C] of the chunk's, and [1, C] of each one before it."""
    c, run = plan.latte.chunk, runs[0:1, :]
    across = jnp.broadcast_to(run, (c, c)).T
    t, s = (jax.lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))

    def held(back: int, run: Array) -> Array:
        """The window's pairs with the chunk `back` chunks before."""
        reach = plan.window - back * c
        return (across == run) & (t - s < reach) if reach < c else across == run

    own, *others = [held(back, x) for back, x in enumerate([run, *(ref[0:1, :] for ref in past)])]
    return Sight(s <= t, t <= s, [(own & (s <= t)) | others[-1], *others[:-1]])


def fold(where: Bool[Array, "C C"], parts: list[Array]) -> list[Array]:
    return [jnp.where(where, parts[0], parts[-1]), *parts[1:-1]]


def unfold(where: Bool[Array, "C C"], folded: list[Array]) -> list[Array]:
    both, *middle = folded
    return [jnp.where(where, both, 0), *middle, jnp.where(where, 0, both)]


class Near(NamedTuple):
    """A head's softmax over its window, in folded parts, and the derivative of its soft-cap."""

    weights: list[Float[Array, "C C"]]
    slope: list[Float[Array, "C C"]]


def added(parts: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, parts)


Sum = Callable[[list[Array]], Array]
"""A sum over all keys, of parts [C, C]: [C, 1], or [C, C] with the same in every lane."""


def sum_lanes(parts: list[Float[Array, "C C"]]) -> Float[Array, "C 1"]:
    return added(jnp.sum(x, axis=1, keepdims=True) for x in parts)


def sum_products(plan: Plan) -> Sum:
    """On the matrix units, of which the forward kernel has some to spare."""
    ones = jnp.ones((plan.latte.chunk, plan.latte.chunk), jnp.float32)
    return lambda parts: added(sums_across(x, ones, plan.latte.dtype) for x in parts)


def attend(
    plan: Plan,
    seen: Sight,
    q: Float[Array, "C K"],
    keys: list[Float[Array, "C K"]],
    total: Sum = sum_lanes,
) -> Near:
    """softmax(cap(scale · q kᵀ)) of one head; `keys` of its own chunk, the one before it, …"""
    dtype = plan.latte.dtype
    products = [dot(q, k, NT, dtype) for k in keys]
    logits = [x * plan.scale for x in fold(seen.own, products)]
    slope = []
    if plan.softcap is not None:
        waves = [jnp.tanh(x * (1 / plan.softcap)) for x in logits]
        logits = [plan.softcap * x for x in waves]
        slope = [1 - x * x for x in waves]
    pairs = zip(seen.visible, logits, strict=True)
    logits = [jnp.where(visible, x, -jnp.inf) for visible, x in pairs]
    # A token sees itself, so that the largest logit is finite.
    top = functools.reduce(jnp.maximum, [jnp.max(x, axis=1, keepdims=True) for x in logits])
    weights = [jnp.exp(x - top) for x in logits]
    scale = inverse(total(weights))
    return Near([x * scale for x in weights], slope)


class Pulled(NamedTuple):
    """Gradients of a head's window: of its mass p0, and of its products q kᵀ in folded parts."""

    mass: Float[Array, "C 1"]
    products: list[Float[Array, "C C"]]


def pull(
    plan: Plan,
    near: Near,
    mass: Float[Array, "C 1"],
    gradients: list[Float[Array, "C C"]],
) -> Pulled:
    """From the gradients dy vᵀ of the weights p0 · softmax, in folded parts.

    d p0 = Σ_s P_ts dy_t·v_s and d logit_ts = p0 P_ts (dy_t·v_s − d p0).
    """
    weighted = [p * g for p, g in zip(near.weights, gradients, strict=True)]
    change = sum_lanes(weighted)
    # p0 P (g − d p0), of which P g is at hand.
    rows = mass * plan.scale
    products = [rows * (x - p * change) for x, p in zip(weighted, near.weights, strict=True)]
    if near.slope:
        products = [x * slope for x, slope in zip(products, near.slope, strict=True)]
    return Pulled(change, products)
