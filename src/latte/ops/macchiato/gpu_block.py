"""What the fused kernels share: their sizes, where their arrays lie, and what they read of a chunk.

A program owns a chunk of one head, as in `latte.ops.latte.gpu_block`; the window's arrays come to
it as whole rows, of which it reads its own chunk and those that the window reaches. Where a state
is given, its cached keys and values stand before the others, filled up to whole chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from latte.ops.attention import gpu_block as near
from latte.ops.attention.gpu_block import Keys, Plan, Queries, padded
from latte.ops.attention.scores import Window
from latte.ops.latte import gpu_block, gpu_gradients
from latte.ops.latte.gpu_block import Ref, Shape


@dataclass(frozen=True)
class Tiles(gpu_block.Tiles):
    """As for Latte, and the pipeline of loops over the chunks that a window reaches."""

    window_stages: int = 2

    @classmethod
    def of(cls, size: int, dtype: jnp.dtype) -> "Tiles":
        """Tiles for heads of up to `size` channels, as measured on an H200; eight warps where what
        four would hold does not fit their registers by far."""
        wide = dict.fromkeys(("state_warps", "output_warps", "query_warps", "key_warps"), 8)
        if dtype == jnp.float32:
            return cls(chunk=32 if size <= 128 else 16, window_stages=1, **wide)
        if size <= 128:
            return cls()
        return cls(**wide)


class Call(NamedTuple):
    """What all kernels of a call know when they are compiled: of the latents, and of the window."""

    shape: Shape
    plan: Plan
    window: int
    tiles: Tiles
    interpret: bool

    @property
    def reach(self) -> int:
        """How many chunks before its own a chunk may see."""
        return pl.cdiv(self.window - 1, self.shape.chunk)

    @property
    def past(self) -> int:
        """Chunks of keys before the first query's own."""
        return self.plan.past // self.shape.chunk

    @property
    def own(self) -> Plan:
        """The plan of a chunk and itself; a window as wide as a chunk hides nothing in it."""
        left = None if self.window >= self.shape.chunk else self.window - 1
        return replace(self.plan, window=Window(left, 0))

    @property
    def apart(self) -> Plan:
        """The plan of two chunks, of which the keys' is the earlier one."""
        return replace(self.plan, window=Window(self.window - 1, None))

    def state_rows(self, tokens: int) -> pl.BlockSpec:
        """Of q, whose first column is the window's."""
        return self.shape.rows(1 + self.shape.wide_latents, tokens)

    def query_rows(self) -> pl.BlockSpec:
        """The window's queries of one head, all of them."""
        return _whole(self.plan.queries, self.plan.key_size)

    def cotangents(self) -> pl.BlockSpec:
        return _whole(self.plan.queries, self.plan.size)

    def key_rows(self) -> list[pl.BlockSpec]:
        """The window's keys and values of one head, all of them."""
        sizes = self.plan.key_size, self.plan.size
        return [_whole(self.plan.keys, size, self.plan.share) for size in sizes]

    def runs(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.plan.keys), lambda h, j, b: (b, 0))

    def numbers(self) -> pl.BlockSpec:
        """Of [B, H, T], those of one head."""
        return pl.BlockSpec((None, None, self.plan.queries), lambda h, j, b: (b, h, 0))

    def own_numbers(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.shape.chunk), lambda h, j, b: (b, h, j))

    def numbers_array(self) -> jax.ShapeDtypeStruct:
        shape = self.shape.batch, self.shape.heads, self.shape.length
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def kernel(
        self,
        body: Callable,
        name: str,
        grid: tuple[int, int, int],
        warps: int,
        stages: int,
        **specs: Any,
    ) -> Callable:
        return pl.pallas_call(
            partial(body, call=self),
            grid=grid,
            compiler_params=gpu_block.params(warps, stages),
            interpret=self.interpret,
            name=f"macchiato_{name}",
            **specs,
        )


def _whole(length: int, size: int, share: int = 1) -> pl.BlockSpec:
    block = (None, length, None, padded(size))
    return pl.BlockSpec(block, lambda h, j, b: (b, 0, jax.lax.div(h, share), 0))


class Near(NamedTuple):
    """References to the window's arrays, whole rows; run numbers are those of keys and values."""

    run: Ref
    q: Ref
    k: Ref
    v: Ref

    def keys(self, call: Call, j: Array | int) -> Keys:
        """Those of chunk j, counted from the first of the past."""
        at = near.tokens(j, call.shape.chunk)
        here = pl.ds(j * call.shape.chunk, call.shape.chunk)
        return call.plan.load_keys((self.k.at[here], self.v.at[here], self.run.at[here]), at)

    def queries(self, call: Call, i: Array | int) -> Queries:
        """Those of chunk i, counted from the first that has queries."""
        size = call.shape.chunk
        here, there = pl.ds(i * size, size), pl.ds((i + call.past) * size, size)
        refs = self.q.at[here], self.run.at[there]
        return call.plan.load_queries(refs, near.tokens(i, size))


@dataclass(frozen=True)
class Inputs(gpu_gradients.Inputs):
    """A chunk as Latte's kernels read it, with a window beside the latents."""

    call: Call
    near: Near

    @property
    def states(self) -> tuple[Float[Array, " C"], Float[Array, "C N"]]:
        """p of the window and of the latents."""
        q = self.rows.load(self.refs[0], self.rows.shape.latents, skip=1).astype(jnp.float32)
        q0 = plgpu.load(self._first_column(self.refs[0]), mask=self.real, other=self._none(0.0))
        q0 = q0.astype(jnp.float32)
        if self.rows.shape.latents < q.shape[1]:
            q = jnp.where(gpu_block.cells(q.shape[1])[None] < self.rows.shape.latents, q, -jnp.inf)
        top = jnp.maximum(q0, jnp.max(q, axis=1))
        p0, p = gpu_block.exp(q0 - top), gpu_block.exp(q - top[:, None])
        share = 1 / (p0 + jnp.sum(p, axis=1))
        return p0 * share, p * share[:, None]

    @property
    def p(self) -> Float[Array, "C N"]:
        return self.states[1]

    @property
    def real(self) -> Array | None:
        """Which tokens exist; None for all."""
        if self.rows.left is None:
            return None
        return gpu_block.cells(self.rows.shape.chunk) < self.rows.left

    def store_states(self, ref: Ref, first: Float[Array, " C"], others: Float[Array, "C N"]):
        plgpu.store(self._first_column(ref), first.astype(ref.dtype), mask=self.real)
        self.rows.store(ref, others, self.rows.shape.latents, skip=1)

    def _first_column(self, ref: Ref) -> Ref:
        # The interpreter takes no plain 0.
        return ref.at[pl.ds(self.rows.start, self.rows.shape.chunk), jnp.int32(0)]

    def _none(self, fill: float) -> float | None:
        return None if self.rows.left is None else fill
