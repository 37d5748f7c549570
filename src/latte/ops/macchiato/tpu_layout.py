"""What the fused kernels read and write; what is not here is as in `latte.ops.latte.tpu_forward`.

q comes as [B, H · (N + 1), T], time in lanes: its rows of H · (N + 1) logits could not be cut at
whole lanes, nor its softmaxes be taken without reductions across them; and XLA itself keeps an
array of that shape so.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from latte.ops.latte.tpu_chunk import Group, Layout
from latte.ops.latte.tpu_forward import token_spec


@dataclass(frozen=True)
class Plan:
    """Sizes of one call. latte: those of its latents, values and chunks. key_size: channels of a
    window's key; scale, softcap: of its logits."""

    latte: Layout
    key_size: int
    window: int
    scale: float
    softcap: float | None

    @property
    def before(self) -> int:
        """Chunks before a token's own that its window reaches, as `tpu_window` counts them."""
        return -(-self.window // self.latte.chunk)

    @property
    def states(self) -> int:
        """A head's states: its latents and the window."""
        return self.latte.latents + 1


class Tokens(NamedTuple):
    """q [B, H · (N + 1), T], k [B, T, H · N], v [B, T, H · D], qw and kw [B, T, H · K]; or their
    blocks, or their gradients."""

    q: Any
    k: Any
    v: Any
    qw: Any
    kw: Any


class Cache(NamedTuple):
    """Keys [B, n · C, H · K] and values [B, n · C, H · D] of the n chunks before a call's first."""

    kw: Any
    v: Any


class State(NamedTuple):
    """Latte's carried state: rows (m, z) and s."""

    rows: Any
    s: Any


def token_specs(plan: Plan, last: int | None = None) -> Tokens:
    """With `last`, counted back from that chunk."""
    layout = plan.latte
    latents, values, keys = (
        token_spec(layout, width, last) for width in (layout.latents, layout.size, plan.key_size)
    )

    def index(b: Array, h: Array, c: Array) -> tuple:
        return b, h, c if last is None else last - c

    q = pl.BlockSpec((None, layout.block * plan.states, layout.chunk), index)
    return Tokens(q, latents, values, keys, keys)


def past_runs_specs(plan: Plan, last: int | None = None) -> tuple[pl.BlockSpec, ...]:
    """Of run numbers [B, 1, n · C + T], for each chunk that a window reaches back to."""

    def spec(back: int) -> pl.BlockSpec:
        def index(b: Array, h: Array, c: Array) -> tuple:
            return b, 0, plan.before - back + (c if last is None else last - c)

        return pl.BlockSpec((None, 1, plan.latte.chunk), index)

    return tuple(spec(i + 1) for i in range(plan.before))


def cache_room(plan: Plan, *dtypes: Any) -> Cache:
    """Scratch for the chunks that a window reaches back to."""
    widths = plan.key_size, plan.latte.size
    return Cache(
        *(
            pltpu.VMEM((plan.before * plan.latte.chunk, plan.latte.block * width), dtype)
            for width, dtype in zip(widths, dtypes, strict=True)
        )
    )


def cache_part(plan: Plan, whole: Cache) -> Cache:
    """Of caches in HBM, the row and the block of heads of this grid step."""
    row, block = pl.program_id(0), pl.program_id(1)

    def part(ref: Any, width: int) -> Any:
        width *= plan.latte.block
        return ref.at[row, :, pl.ds(pl.multiple_of(block * width, width), width)]

    return Cache(part(whole.kw, plan.key_size), part(whole.v, plan.latte.size))


def copy(source: Cache, target: Cache) -> None:
    for pair in zip(source, target, strict=True):
        pltpu.sync_copy(*pair)


def place(plan: Plan, chunk: Array, back: int) -> Any:
    """Where the chunk `back` chunks before this one is among the n that are kept; the one that is
    n back has the place that this one will take."""
    n, size = plan.before, plan.latte.chunk
    if n == 1:
        return slice(0, size)
    return pl.ds(pl.multiple_of((chunk + n - back) % n * size, size), size)


def keys_of(plan: Plan, group: Group, h: int) -> slice:
    """A head's window keys in lanes of its block."""
    first = (group.index * plan.latte.group + h) * plan.key_size
    return slice(first, first + plan.key_size)


def values_of(group: Group, h: int) -> slice:
    """A head's values in lanes of its block."""
    first = (group.index * group.layout.group + h) * group.layout.size
    return slice(first, first + group.layout.size)


def shapes(arrays: Any, dtype: Any = None) -> Any:
    """Results like these arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), arrays)
