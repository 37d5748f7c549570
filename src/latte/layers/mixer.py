"""What every token mixer is: a function of a sequence that carries a state."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, Int, PyTree


class Place(NamedTuple):
    """Where the tokens of a call stand: the document of each, and its position in that document."""

    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def stateless(op: Callable[..., Array]) -> Callable[..., tuple[Array, None]]:
    """An encoder's op as one that has a state, which is none."""

    def with_state(*arrays: Array, state: None = None, **settings: Any) -> tuple[Array, None]:
        return op(*arrays, **settings), state

    return with_state


class Mixer(eqx.Module):
    """Mixes tokens of one document. Its state is a pytree; an encoder's is None."""

    @abstractmethod
    def __call__(
        self, x: Float[Array, "B T D"], place: Place, state: PyTree | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """A sequence, after the tokens that `state` has seen; returns the state after its last."""

    @abstractmethod
    def empty_state(self, batch: int, room: int) -> PyTree:
        """The state before any token; full attention keeps `room` tokens, others a fixed size."""

    def step(
        self, x: Float[Array, "B D"], place: Place, state: PyTree
    ) -> tuple[Float[Array, "B D"], Any]:
        """One token: a sequence of length one."""
        y, state = self(x[:, None], place, state)
        return y[:, 0], state
