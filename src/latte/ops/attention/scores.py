"""What attention looks at and how it scores it, as values that the implementations share."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Window(NamedTuple):
    """How many tokens to the left and to the right a token sees; None for all of them."""

    left: int | None
    right: int | None

    @classmethod
    def of(cls, window: int | tuple[int | None, int | None] | None) -> "Window":
        """W keys, the token itself included; or (left, right); or None for the whole past."""
        if window is None:
            return cls(None, 0)
        if isinstance(window, int):
            window = (window - 1, 0)
        left, right = window
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise ValueError(f"a window must hold the token itself, not {window}")
        return cls(left, right)

    def holds(self, t: Int[Array, "*#shape"], s: Int[Array, "*#shape"]) -> Bool[Array, "*shape"]:
        """Whether the token at place t sees the one at place s."""
        near = jnp.ones(jnp.broadcast_shapes(t.shape, s.shape), bool)
        if self.left is not None:
            near &= t - s <= self.left
        if self.right is not None:
            near &= s - t <= self.right
        return near


class Score(NamedTuple):
    """From products q·k to logits."""

    scale: float
    softcap: float | None

    @classmethod
    def of(cls, key_size: int, scale: float | None, softcap: float | None) -> "Score":
        """By a scale of 1/√K where none is given."""
        return cls(key_size**-0.5 if scale is None else scale, softcap)

    def __call__(self, products: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        logits = products * self.scale
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)
