"""What attention's GPU kernels share: access to blocks of tokens, and the algebra of one block.

Blocks are padded to powers of two, as Triton wants. Queries lie along the first axis of a block of
pairs and keys along the second; a kernel that owns keys has them the other way (`by_keys`).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from latte.ops.attention.scores import Score, Window

_LOG2E = math.log2(math.e)

_NO_QUERY, _NO_KEY = -3, -2
"""Run numbers of what fills up a block: they equal none, and not each other."""


class Queries(NamedTuple):
    """A block of queries, its tokens' places among the keys, and their run numbers."""

    x: Float[Array, "C K"]
    at: Int[Array, " C"]
    run: Int[Array, " C"]


class Keys(NamedTuple):
    """A block of keys and values, likewise; no run numbers where its queries see all of it."""

    x: Float[Array, "C K"]
    v: Float[Array, "C D"]
    at: Int[Array, " C"]
    run: Int[Array, " C"] | None


class Sums(NamedTuple):
    """Of each query: its largest raw logit, log2 of its sum above that, and δ = dy · y."""

    m: Float[Array, " C"]
    l: Float[Array, " C"]
    delta: Float[Array, " C"]


@dataclass(frozen=True)
class Plan:
    """What all kernels of a call know when they are compiled.

    past: keys before the first query's own.
    queries, keys: tokens. key_size, size: channels of q and k, and of v and y.
    share: query heads that read one key-value head.
    """

    window: Window
    score: Score
    past: int
    queries: int
    keys: int
    key_size: int
    size: int
    share: int
    dtype: jnp.dtype

    @property
    def steepness(self) -> float:
        """From raw logits to exponents of two: positive, so that both have the same largest one."""
        cap = self.score.softcap
        return _LOG2E * (self.score.scale if cap is None else cap)

    def dot(self, a: Array, b: Array, **transposed: bool) -> Array:
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        return plgpu.dot(a, b, precision=precision, **transposed)

    def load_queries(self, refs: tuple, at: Int[Array, " C"]) -> Queries:
        """The queries of tokens `at` from references to them and to their run numbers."""
        x = load_rows(refs[0], at, self.queries, self.key_size)
        return Queries(x, at + self.past, load_numbers(refs[1], at, self.queries, _NO_QUERY))

    def load_keys(self, refs: tuple, at: Int[Array, " C"], masked: bool = True) -> Keys:
        """The keys at places `at` from references to k, v and run numbers."""
        k = load_rows(refs[0], at, self.keys, self.key_size)
        v = load_rows(refs[1], at, self.keys, self.size)
        return Keys(k, v, at, load_numbers(refs[2], at, self.keys, _NO_KEY) if masked else None)

    def load_sums(self, refs: tuple, at: Int[Array, " C"]) -> Sums:
        return Sums(*(load_numbers(ref, at, self.queries, 0.0) for ref in refs))

    def logits(self, q: Queries, k: Keys, by_keys: bool = False) -> tuple[Array, Array]:
        """Raw logits, without a factor that is multiplied in when the largest has been taken off;
        and the same with −∞ where two tokens do not see each other."""
        products = self.dot(*((k.x, q.x) if by_keys else (q.x, k.x)), trans_b=True)
        cap = self.score.softcap
        raw = products if cap is None else jnp.tanh(products * (self.score.scale / cap))
        if k.run is None:
            return raw, raw
        along_q, along_k = (None, slice(None)), (slice(None), None)
        if not by_keys:
            along_q, along_k = along_k, along_q
        near = self.window.holds(q.at[along_q], k.at[along_k])
        return raw, jnp.where(near & (q.run[along_q] == k.run[along_k]), raw, -jnp.inf)

    def weigh(
        self, z: Float[Array, "C S"], m: Float[Array, " C"]
    ) -> tuple[Float[Array, "C S"], Float[Array, " C"], Float[Array, " C"]]:
        """Weights under the largest logit so far, what is left of earlier weights, that logit."""
        top = jnp.maximum(m, jnp.max(z, axis=1))
        # A query that has seen no key yet has no largest logit to take off.
        base = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp2((z - base[:, None]) * self.steepness)
        return weights, jnp.exp2((m - base) * self.steepness), top

    def visit_keys(
        self,
        carry: tuple[Float[Array, "C D"], Float[Array, " C"], Float[Array, " C"]],
        q: Queries,
        k: Keys,
    ) -> tuple[Float[Array, "C D"], Float[Array, " C"], Float[Array, " C"]]:
        """(u, m, ℓ) of a block of queries after one more block of keys."""
        u, m, l = carry
        weights, kept, m = self.weigh(self.logits(q, k)[1], m)
        u = u * kept[:, None] + self.dot(weights, k.v)
        return u, m, l * kept + jnp.sum(weights, axis=1)

    def nothing_seen(self, count: int) -> tuple[Array, Array, Array]:
        """(u, m, ℓ) of queries before their first key."""
        zeros = jnp.zeros((count,), jnp.float32)
        u = jnp.zeros((count, padded(self.size)), jnp.float32)
        return u, jnp.full((count,), -jnp.inf, jnp.float32), zeros

    def weights(self, z: Array, sums: Sums, by_keys: bool = False) -> Array:
        """The softmax, from what it left of each query."""
        m, l = (x[None] if by_keys else x[:, None] for x in (sums.m, sums.l))
        return jnp.exp2((z - m) * self.steepness - l)

    def pull(self, weights: Array, raw: Array, da: Array, delta: Array) -> Array:
        """The gradient of products but for the scale, from `da`, that of the weights."""
        dz = weights * (da - delta)
        return dz if self.score.softcap is None else dz * (1 - raw * raw)

    def pull_keys(
        self,
        carry: tuple[Float[Array, "S K"], Float[Array, "S D"]],
        q: Queries,
        k: Keys,
        sums: Sums,
        dy: Float[Array, "C D"],
    ) -> tuple[Float[Array, "S K"], Float[Array, "S D"]]:
        """Adds to (dk, dv) of a block of keys what a block of queries says of it."""
        raw, z = self.logits(q, k, by_keys=True)
        weights = self.weights(z, sums, by_keys=True)
        dv = carry[1] + self.dot(weights, dy)
        dz = self.pull(weights, raw, self.dot(k.v, dy, trans_b=True), sums.delta[None])
        return carry[0] + self.dot(dz, q.x), dv


def padded(size: int) -> int:
    """Channels that a block holds: a power of two, and no fewer than a matrix product takes."""
    return max(16, pl.next_power_of_2(size))


def tokens(block: Array | int, count: int) -> Int[Array, " C"]:
    return block * count + jnp.arange(count, dtype=jnp.int32)


def inside(at: Int[Array, " C"], length: int) -> Array | None:
    """Which tokens exist; None where blocks end with the sequence."""
    return None if length % at.shape[0] == 0 else at < length


def _rows_mask(at: Int[Array, " C"], length: int, size: int) -> Array | None:
    """Which entries [C, padded size] of a block exist; None for all of them."""
    rows, wide = inside(at, length), padded(size)
    channels = None if wide == size else (jnp.arange(wide, dtype=jnp.int32) < size)[None]
    if rows is None:
        return channels
    return rows[:, None] if channels is None else rows[:, None] & channels


def load_rows(ref: Any, at: Int[Array, " C"], length: int, size: int) -> Float[Array, "C X"]:
    """A block of tokens, zero where there is no token or channel."""
    mask = _rows_mask(at, length, size)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def store_rows(ref: Any, x: Float[Array, "C X"], at: Int[Array, " C"], length: int, size: int):
    plgpu.store(ref, x.astype(ref.dtype), mask=_rows_mask(at, length, size))


def load_numbers(ref: Any, at: Int[Array, " C"], length: int, fill: int | float) -> Array:
    """A number a token, `fill` where there is none."""
    mask = inside(at, length)
    return plgpu.load(ref, mask=mask, other=None if mask is None else fill)


def store_numbers(ref: Any, x: Array, at: Int[Array, " C"], length: int) -> None:
    plgpu.store(ref, x, mask=inside(at, length))
