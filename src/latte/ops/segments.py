"""Document boundaries, shared by every op.

Rows are packed from documents, and no op lets anything cross from one to the next. A document is a
maximal run of equal segment ids (ids are ≥ 0; the same id after another one is a new document). A
state remembers the id of the last token that it saw, so that a call may go on in that document.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from latte.ops import context

EMPTY = -1
"""The segment id of a state that has seen no token."""


class Runs(NamedTuple):
    """The documents of one call, numbered in order.

    run: 0 for tokens that go on in the state's own document, then 1, 2, … Two tokens may see each
        other when their numbers are equal, and a token may see the carried state when its is 0.
    first: a token is the first of its document.
    last: the segment id of the last token, for the state that the call returns.
    """

    run: Int[Array, "B T"]
    first: Bool[Array, "B T"]
    last: Int[Array, " B"]


def number_runs(
    segment_ids: Int[Array, "B T"] | None, previous: Int[Array, " B"], length: int
) -> Runs:
    """Numbers the documents of `length` tokens that follow a token of segment `previous`.

    Without segment ids all tokens belong to one document, the state's own where it has one.
    """
    if segment_ids is None:
        segment_ids = jnp.broadcast_to(
            jnp.maximum(previous, 0)[:, None], (previous.shape[0], length)
        )
    segment_ids = segment_ids.astype(jnp.int32)
    before = jnp.concatenate([previous[:, None], segment_ids[:, :-1]], axis=1)
    first = segment_ids != before
    return Runs(jnp.cumsum(first, axis=1, dtype=jnp.int32), first, segment_ids[:, -1])


class _Part(NamedTuple):
    """What a part of a row comes to: documents that begin in it, and how far it is into its last.

    begun: documents that begin in the part. length: tokens of the last of them, or all of the part
    where none begins.
    """

    begun: Int[Array, " B"]
    length: Int[Array, " B"]


def _merge(left: _Part, right: _Part) -> _Part:
    """The part that two neighbours make."""
    length = right.length + jnp.where(right.begun == 0, left.length, 0)
    return _Part(left.begun + right.begun, length)


def place(
    segment_ids: Int[Array, "B T"], *, axis: str | None = None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The documents of a row, numbered so that none comes back, and positions in them.

    Args:
        axis: inside `jax.shard_map`, the mesh axis that T is spread over; no neighbouring parts
            of different documents may meet at the same id.
    """
    batch, length = segment_ids.shape
    nothing = jnp.zeros((batch,), jnp.int32)
    previous = nothing + EMPTY
    if axis is not None:
        previous = context.from_left(segment_ids[:, -1], axis, previous)
    runs = number_runs(segment_ids, previous, length)
    at = jnp.arange(length)
    start = jax.lax.cummax(jnp.where(runs.first, at, -1), axis=1)
    begun = runs.run[:, -1]
    left = _Part(nothing, nothing)
    if axis is not None:
        part = _Part(begun, length - jnp.maximum(start[:, -1], 0))
        left = context.before(part, _merge, axis, left, left)
    positions = jnp.where(start < 0, left.length[:, None] + at, at - start)
    return left.begun[:, None] + runs.run, positions
