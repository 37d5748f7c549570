"""The feed-forward half of a block."""

from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from latte.layers.linear import Linear


class GeluMLP(eqx.Module):
    """gelu(x W_in) W_out."""

    project_in: Linear
    project_out: Linear

    def __init__(self, width: int, hidden: int, *, gain_out: float, key: PRNGKeyArray):
        key_in, key_out = jax.random.split(key)
        self.project_in = Linear(width, hidden, key=key_in)
        self.project_out = Linear(hidden, width, key=key_out, gain=gain_out)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.project_out(jax.nn.gelu(self.project_in(x)))


class GLU(eqx.Module):
    """(silu(x W_gate) · x W_in) W_out (Dauphin et al., 2017, with SiLU as in Shazeer, 2020)."""

    project_gate: Linear
    project_in: Linear
    project_out: Linear

    def __init__(self, width: int, hidden: int, *, gain_out: float, key: PRNGKeyArray):
        key_gate, key_in, key_out = jax.random.split(key, 3)
        self.project_gate = Linear(width, hidden, key=key_gate)
        self.project_in = Linear(width, hidden, key=key_in)
        self.project_out = Linear(hidden, width, key=key_out, gain=gain_out)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.project_out(jax.nn.silu(self.project_gate(x)) * self.project_in(x))


def make_mlp(
    kind: Literal["gelu", "glu"], width: int, hidden: int, *, gain_out: float, key: PRNGKeyArray
) -> GeluMLP | GLU:
    """The MLP that a config names."""
    return (GLU if kind == "glu" else GeluMLP)(width, hidden, gain_out=gain_out, key=key)
