"""A sequence spread over devices: what they exchange, inside `jax.shard_map`.

Every device holds an equal part of the row, in order along a mesh axis. It reads its part apart,
to a state of constant size; states merge from left to right in ⌈log₂ n⌉ exchanges; and the op goes
over the part once more, from the state that came before it. What is exchanged does not grow with T.

Parts of one document are told by equal segment ids, so an id must not come back within a row:
`latte.ops.segments.place` numbers documents so.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

State = TypeVar("State")


def numbered(segment_ids: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """The segment ids, without which parts of a row cannot tell whether they are of one document.

    Raises:
        ValueError: there are none.
    """
    if segment_ids is None:
        raise ValueError("an op over several devices needs segment_ids, numbered along the row")
    return segment_ids


def from_left(x: State, axis: str, first: State, distance: int = 1) -> State:
    """What the device `distance` places to the left holds; `first` where there is none."""
    count = jax.lax.axis_size(axis)
    pairs = [(i, i + distance) for i in range(count - distance)]
    has_left = jax.lax.axis_index(axis) >= distance
    moved = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, pairs), x)
    return jax.tree.map(lambda a, b: jnp.where(has_left, a, b), moved, first)


def before(
    part: State, merge: Callable[[State, State], State], axis: str, empty: State, first: State
) -> State:
    """The state before each device's part: `first`, and all parts to the left, merged.

    Args:
        part: the state of this device's part, read apart.
        merge: an associative rule, from (left, right).
        empty: the state that merges to the other one.
        first: the state before the whole row.
    """
    state = from_left(part, axis, first)
    distance = 1
    while distance < jax.lax.axis_size(axis):
        state = merge(from_left(state, axis, empty, distance), state)
        distance *= 2
    return state
