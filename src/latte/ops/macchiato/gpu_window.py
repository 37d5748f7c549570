"""The window's part of a chunk in the fused kernels, forward and backward.

Earlier chunks of keys come first, by an online softmax, and the chunk's own last: its weights are
then known under their final sum, so that Latte's can be added before one product with v.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from latte.ops.attention.gpu_block import Keys, Plan, Queries, Sums, padded
from latte.ops.macchiato.gpu_block import Call, Inputs, Near


def _over_earlier(inputs: Inputs, visit: Callable, carry):
    """Calls visit(keys, carry) for each earlier chunk that the window reaches."""
    call, own = inputs.call, inputs.index + inputs.call.past

    def body(j, carry):
        return visit(inputs.near.keys(call, j), carry)

    return jax.lax.fori_loop(jnp.maximum(own - call.reach, 0), own, body, carry)


def own_keys(inputs: Inputs) -> Keys:
    return inputs.near.keys(inputs.call, inputs.index + inputs.call.past)


def attend(
    inputs: Inputs, p0: Float[Array, " C"]
) -> tuple[Float[Array, "C D"], Float[Array, "C C"], Float[Array, " C"], Float[Array, " C"]]:
    """p0 times what earlier chunks give and the weights of this one; m, and log2 of the sum."""
    call = inputs.call
    q = inputs.near.queries(call, inputs.index)

    def visit(k, carry):
        return call.apart.visit_keys(carry, q, k)

    u, m, l = _over_earlier(inputs, visit, call.plan.nothing_seen(call.shape.chunk))
    weights, kept, m = call.own.weigh(call.own.logits(q, own_keys(inputs))[1], m)
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
    q = inputs.near.queries(call, inputs.index)
    sums = Sums(m, l, jnp.zeros_like(l))

    def weigh(plan: Plan, k: Keys) -> tuple[Array, Array, Array]:
        raw, z = plan.logits(q, k)
        return plan.weights(z, sums), raw, plan.dot(dy, k.v, trans_b=True)

    def mean(plan: Plan, k: Keys, delta: Array) -> Array:
        weights, _, da = weigh(plan, k)
        return delta + jnp.sum(weights * da, axis=1)

    def pull(plan: Plan, k: Keys, dq: Array) -> Array:
        return dq + plan.dot(plan.pull(*weigh(plan, k), delta[:, None]), k.x)

    delta = _over_earlier(inputs, lambda k, x: mean(call.apart, k, x), jnp.zeros_like(l))
    delta = mean(call.own, own_keys(inputs), delta)
    dq = jnp.zeros((call.shape.chunk, padded(call.plan.key_size)), jnp.float32)
    dq = _over_earlier(inputs, lambda k, x: pull(call.apart, k, x), dq)
    dq = pull(call.own, own_keys(inputs), dq)
    return dq * (p0 * call.plan.score.scale)[:, None], delta


def pull_later(
    call: Call, near: Near, read: Callable, j: Array
) -> tuple[Float[Array, "C K"], Float[Array, "C D"]]:
    """What later chunks say of the keys and values of chunk j, counted from the first of the past.

    `read` gives dy and the sums of a chunk of queries.
    """
    keys, plan = near.keys(call, j), call.apart

    def body(i, carry):
        dy, sums = read(i)
        return plan.pull_keys(carry, near.queries(call, i), keys, sums, dy)

    zeros = tuple(
        jnp.zeros((call.shape.chunk, padded(size)), jnp.float32)
        for size in (plan.key_size, plan.size)
    )
    first = jnp.maximum(j - call.past + 1, 0)
    last = jnp.minimum(j - call.past + call.reach + 1, call.shape.chunks)
    return jax.lax.fori_loop(first, last, body, zeros)


def pull_own(
    inputs: Inputs, sums: Sums
) -> tuple[Queries, Float[Array, "C C"], Float[Array, "C C"]]:
    """The chunk's queries, its weights among itself and the gradient of their products."""
    q, k, plan = inputs.near.queries(inputs.call, inputs.index), own_keys(inputs), inputs.call.own
    raw, z = plan.logits(q, k)
    weights = plan.weights(z, sums)
    da = plan.dot(inputs.dy, k.v, trans_b=True)
    return q, weights, plan.pull(weights, raw, da, sums.delta[:, None])
