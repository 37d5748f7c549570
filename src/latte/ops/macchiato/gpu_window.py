"""The window's part of a chunk in the fused kernels, forward and backward.

Earlier chunks of keys come first, by an online softmax, and the chunk's own last: its weights are
then known under their final sum, so that Latte's can be added before one product with v.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from latte.ops.attention.gpu_block import Keys, Sums, padded
from latte.ops.macchiato.gpu_block import Call, Inputs, Near


def _over_keys(inputs: Inputs, end: Array, visit: Callable, carry: Any) -> Any:
    """Calls visit(keys, carry) for each chunk that the window reaches and that is before `end`."""
    call = inputs.call

    def body(j, carry):
        return visit(inputs.near.keys(call, j), carry)

    first = jnp.maximum(inputs.index + call.past - call.reach, 0)
    return jax.lax.fori_loop(first, end, body, carry)


def attend(
    inputs: Inputs, p0: Float[Array, " C"]
) -> tuple[Float[Array, "C D"], Float[Array, "C C"], Float[Array, " C"], Float[Array, " C"]]:
    """p0 times what earlier chunks give and the weights of this one; m, and log2 of the sum."""
    call = inputs.call
    q = inputs.near.queries(call, inputs.index)

    def visit(k, carry):
        return call.apart.visit_keys(carry, q, k)

    own = inputs.index + call.past
    u, m, l = _over_keys(inputs, own, visit, call.plan.nothing_seen(call.shape.chunk))
    z = call.own.logits(q, inputs.near.keys(call, own))[1]
    weights, kept, m = call.own.weigh(z, m)
    l = l * kept + jnp.sum(weights, axis=1)
    share = p0 / l
    return u * (kept * share)[:, None], weights * share[:, None], m, jnp.log2(l)


def pull_queries(
    inputs: Inputs, p0: Float[Array, " C"], m: Float[Array, " C"], l: Float[Array, " C"]
) -> tuple[Float[Array, "C K"], Float[Array, " C"]]:
    """The gradient of the window's queries, and δ = dy · (what the window gives).

    δ comes from a pass over the window of its own. Taken from dy · y instead, it would be a small
    difference of large terms where p0 is small.
    """
    call, dy = inputs.call, inputs.dy
    q, plan = inputs.near.queries(call, inputs.index), call.plan
    sums = Sums(m, l, jnp.zeros_like(l))

    def weigh(k: Keys) -> tuple[Array, Array, Array]:
        raw, z = plan.logits(q, k)
        return plan.weights(z, sums), raw, plan.dot(dy, k.v, trans_b=True)

    def mean(k: Keys, delta: Array) -> Array:
        weights, _, da = weigh(k)
        return delta + jnp.sum(weights * da, axis=1)

    def pull(k: Keys, dq: Array) -> Array:
        return dq + plan.dot(plan.pull(*weigh(k), delta[:, None]), k.x)

    own = inputs.index + call.past
    delta = _over_keys(inputs, own + 1, mean, jnp.zeros_like(l))
    dq = jnp.zeros((call.shape.chunk, padded(plan.key_size)), jnp.float32)
    dq = _over_keys(inputs, own + 1, pull, dq)
    return dq * (p0 * plan.score.scale)[:, None], delta


def pull_keys(
    call: Call, near: Near, read: Callable, j: Array, dv: Float[Array, "C D"]
) -> tuple[Float[Array, "C K"], Float[Array, "C D"]]:
    """The gradient of the window's keys of chunk j, counted from the first of the past, and `dv`
    with what the window adds to it.

    `read` gives dy and the sums of a chunk of queries.
    """
    keys, plan = near.keys(call, j), call.plan

    def body(i, carry):
        dy, sums = read(i)
        return plan.pull_keys(carry, near.queries(call, i), keys, sums, dy)

    dk = jnp.zeros((call.shape.chunk, padded(plan.key_size)), jnp.float32)
    first = jnp.maximum(j - call.past, 0)
    last = jnp.minimum(j - call.past + call.reach + 1, call.shape.chunks)
    dk, dv = jax.lax.fori_loop(first, last, body, (dk, dv))
    return dk * plan.score.scale, dv
