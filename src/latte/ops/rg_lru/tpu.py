"""RG-LRU on TPU (Pallas, Mosaic): gates and recurrence in one pass over memory, both ways.

The grid is (batch, blocks of channels, blocks of time); time goes last and in order, with the state
carried in VMEM. A block of time is worked through in groups of 16 tokens. Gates are computed where
they lie, tokens along sublanes and channels along lanes. The recurrence wants channels in all of a
register instead, because it goes token by token: the decays and inputs of a group go through a
scratch in which each block of 128 channels has its own rows, [channels / 128 · PITCH, 128], so that
one strided load brings one token of 8 · 128 channels. That is a multiplication and an addition a
token, where a scan along sublanes takes some twenty operations.

The gradient G_t = ∂L/∂h_t obeys G_t = ∂L/∂y_t + a_{t+1} G_{t+1}, and all others are G times a
factor of the token's own inputs and h_{t−1}. The forward pass leaves the state in which each block
begins, so that a block knows h before its first token.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from latte.ops.rg_lru import kernel
from latte.ops.rg_lru.kernel import LOG2E

LANES = 128
SUBLANES = 8
GROUP = 16
"""Tokens of one step of a kernel: one tile of bfloat16."""
PITCH = GROUP + 1
"""Rows between blocks of lanes in a strided scratch; odd, so that strided rows lie in different
banks of memory."""
WINDOW = GROUP + SUBLANES
"""Rows of a group's outputs and their neighbours, from which it is read one token off."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernels' blocks.

    time: tokens of a block at most, in bfloat16; half as many in float32.
    width: channels of a block at most.
    """

    time: int = 128
    width: int = 2048


class _Grid(NamedTuple):
    """The blocks of one call, and the order in which they are visited."""

    batch: int
    widths: int
    times: int
    time: int
    tiles: int  # blocks of lanes in a block of channels
    backwards: bool  # from the last token to the first

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.widths, self.times

    def at(self, t):
        return _nth(t, self.times, self.backwards)

    def sequence(self) -> pl.BlockSpec:
        """Of an array [B, T, W]."""
        return pl.BlockSpec(
            (None, self.time, self.tiles * LANES), lambda b, w, t: (b, self.at(t), w)
        )

    def flags(self) -> pl.BlockSpec:
        """Of the bits of first tokens [B, times, 1, groups], as scalars."""
        groups = self.time // GROUP
        place = lambda b, w, t: (b, self.at(t), 0, 0)  # noqa: E731
        return pl.BlockSpec((None, None, 1, groups), place, memory_space=pltpu.SMEM)

    def channels(self) -> pl.BlockSpec:
        """Of an array [1, W]."""
        return pl.BlockSpec((1, self.tiles * LANES), lambda b, w, t: (0, w))

    def sums(self) -> pl.BlockSpec:
        """Of partial sums over time [B, 8, W]."""
        return pl.BlockSpec((None, SUBLANES, self.tiles * LANES), lambda b, w, t: (b, 0, w))

    def state(self) -> pl.BlockSpec:
        """Of an array [B, widths, tiles, 128]."""
        return pl.BlockSpec((None, None, self.tiles, LANES), lambda b, w, t: (b, w, 0, 0))

    def starts(self) -> pl.BlockSpec:
        """Of an array [B, widths, times, tiles, 128]."""
        block = (None, None, None, self.tiles, LANES)
        return pl.BlockSpec(block, lambda b, w, t: (b, w, self.at(t), 0, 0))

    def state_shape(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.widths, self.tiles, LANES)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def starts_shape(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.widths, self.times, self.tiles, LANES)
        return jax.ShapeDtypeStruct(shape, jnp.float32)


def recurrence(
    x: Float[Array, "B T W"],
    r: Float[Array, "B T W"],
    i: Float[Array, "B T W"],
    lam: Float[Array, " W"],
    first: Bool[Array, "B T"],
    h: Float[Array, "B W"],
    reverse: bool = False,
    *,
    tiles: Tiles = Tiles(),
    interpret: Any = False,
) -> tuple[Float[Array, "B T W"], Float[Array, "B W"]]:
    """What the definition computes, with its state in float32; `first` marks where documents begin.

    Nothing is copied around the kernels when 16 divides T (and so do the blocks that it is cut
    into) and 128 divides W; otherwise tokens that change nothing and idle channels fill them up.

    Args:
        interpret: True or pltpu.InterpretParams to run without a TPU.
    """
    _, T, W = x.shape
    time = _block_of(T, tiles.time * 2 // x.dtype.itemsize)
    T_, W_ = -(-T // time) * time, -(-W // LANES) * LANES
    x, r, i = (
        kernel.pad(kernel.pad(z, 1, T_, fill), 2, W_)
        for z, fill in ((x, 0.0), (r, kernel.IDLE), (i, 0.0))
    )
    first = kernel.pad(first, 1, T_)
    lam, h = kernel.pad(lam, 0, W_), kernel.pad(h, 1, W_)
    static = _Static(reverse, time, _tiles_of(W_, tiles.width), interpret)
    hs, last = _recurrence(x, r, i, lam, first, h.astype(jnp.float32), static)
    return hs[:, :T, :W], last[:, :W].astype(h.dtype)


class _Static(NamedTuple):
    reverse: bool
    time: int
    tiles: int
    interpret: Any


def _block_of(T, limit):
    """Tokens of a block: whole groups, in as few blocks of at most `limit` as hold T tokens."""
    count = -(-T // limit)
    return -(-T // (count * GROUP)) * GROUP


def _tiles_of(W, limit):
    """Blocks of lanes of a block of channels: the largest divisor of what there is."""
    total = W // LANES
    return max(n for n in range(1, max(1, min(total, limit // LANES)) + 1) if total % n == 0)


def _grid(x, static, backwards):
    B, T, W = x.shape
    widths = W // (static.tiles * LANES)
    return _Grid(B, widths, T // static.time, static.time, static.tiles, backwards)


def _flags(first, grid):
    groups = first.reshape(grid.batch, grid.times, 1, grid.time // GROUP, GROUP)
    return kernel.pack_bits(groups)


def _outputs(x, r, i, lam, first, h, static):
    hs, last, *_ = _run(x, r, i, lam, first, h, static, keep_starts=False)
    return hs, last


def _forward(x, r, i, lam, first, h, static):
    hs, last, starts = _run(x, r, i, lam, first, h, static, keep_starts=True)
    return (hs, last), (x, r, i, lam, first, starts, hs)


def _run(x, r, i, lam, first, h, static, *, keep_starts):
    grid = _grid(x, static, static.reverse)
    out_specs = [grid.sequence(), grid.state()]
    out_shape = [jax.ShapeDtypeStruct(x.shape, x.dtype), grid.state_shape()]
    if keep_starts:
        out_specs.append(grid.starts())
        out_shape.append(grid.starts_shape())
    hs, last, *starts = pl.pallas_call(
        functools.partial(_forward_kernel, reverse=static.reverse),
        grid=grid.shape,
        in_specs=[grid.flags(), *[grid.sequence()] * 3, grid.channels(), grid.state()],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((grid.tiles, LANES), jnp.float32),
            *[pltpu.VMEM((grid.tiles * PITCH, LANES), jnp.float32)] * 2,
        ],
        compiler_params=_PARAMS,
        interpret=static.interpret,
        name="rg_lru",
    )(
        _flags(first, grid),
        *(x, r, i),
        kernel.decay_exponent(lam)[None],
        h.reshape(grid.state_shape().shape),
    )
    return hs, last.reshape(h.shape), *starts


def _backward(static, residuals, cotangents):
    x, r, i, lam, first, starts, hs = residuals
    dhs, dlast = cotangents
    grid = _grid(x, static, not static.reverse)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sums = jax.ShapeDtypeStruct((grid.batch, SUBLANES, x.shape[2]), jnp.float32)
    strided = pltpu.VMEM((grid.tiles * PITCH, LANES), jnp.float32)
    plain = pltpu.VMEM((grid.tiles * GROUP, LANES), jnp.float32)
    dx, dr, di, dnu, dh = pl.pallas_call(
        functools.partial(_backward_kernel, reverse=static.reverse),
        grid=grid.shape,
        in_specs=[
            grid.flags(),
            *[grid.sequence()] * 5,
            grid.channels(),
            grid.starts(),
            grid.state(),
        ],
        out_specs=[*[grid.sequence()] * 3, grid.sums(), grid.state()],
        out_shape=[like, like, like, sums, grid.state_shape()],
        scratch_shapes=[
            pltpu.VMEM((grid.tiles, LANES), jnp.float32),
            strided,
            strided,
            *[plain] * 4,
            pltpu.VMEM((grid.tiles * WINDOW, LANES), jnp.float32),
        ],
        compiler_params=_PARAMS,
        interpret=static.interpret,
        name="rg_lru_backward",
    )(
        _flags(first, grid),
        *(x, r, i, hs, dhs),
        kernel.decay_exponent(lam)[None],
        starts,
        dlast.reshape(grid.state_shape().shape),
    )
    dlam = kernel.lam_gradient(dnu.sum((0, 1)), lam)
    return dx, dr.astype(r.dtype), di.astype(i.dtype), dlam, None, dh.reshape(dlast.shape)


_recurrence = jax.custom_vjp(_outputs, nondiff_argnames=("static",))
_recurrence.defvjp(_forward, _backward)

_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _forward_kernel(flags, x, r, i, exponent, h, hs, last, *rest, reverse):
    """Writes h at every token, after the last one, and (where asked for) before each block."""
    *starts, carry, decays, inputs = rest
    block, n, groups = pl.program_id(2), carry.shape[0], x.shape[0] // GROUP

    @pl.when(block == 0)
    def _():
        carry[...] = h[...]

    for ref in starts:
        ref[...] = carry[...]

    def group(k, state):
        g = _nth(k, groups, reverse)
        rows, limit = _rows(g), _limit(flags[0, g])
        for j in range(n):
            lanes = _lanes(j)
            x_, r_, i_ = (z[rows, lanes].astype(jnp.float32) for z in (x, r, i))
            a, b = kernel.step(x_, r_, i_, exponent[:, lanes], limit, _FUNCTIONS)
            decays[pl.ds(j * PITCH, GROUP), :] = a
            inputs[pl.ds(j * PITCH, GROUP), :] = b
        for t in range(GROUP):
            token = pl.ds(_nth(t, GROUP, reverse), n, stride=PITCH)
            state = decays[token, :] * state + inputs[token, :]
            inputs[token, :] = state
        for j in range(n):
            hs[rows, _lanes(j)] = inputs[pl.ds(j * PITCH, GROUP), :].astype(hs.dtype)
        return state

    carry[...] = jax.lax.fori_loop(0, groups, group, carry[...])

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        last[...] = carry[...]


def _backward_kernel(
    flags, x, r, i, hs, dhs, exponent, starts, dlast, dx, dr, di, dnu, dh, carry, *scratch, reverse
):
    """Walks against the forward pass; `carry` is a_{t+1} G_{t+1}, and `dnu` sums over time."""
    decays, gradients, *factors, window = scratch
    block, n, groups = pl.program_id(2), carry.shape[0], x.shape[0] // GROUP

    @pl.when(block == 0)
    def _():
        carry[...] = dlast[...]
        dnu[...] = jnp.zeros_like(dnu)

    def group(k, state):
        g = _nth(k, groups, not reverse)
        rows, limit = _rows(g), _limit(flags[0, g])
        for j in range(n):
            lanes = _lanes(j)
            x_, r_, i_ = (z[rows, lanes].astype(jnp.float32) for z in (x, r, i))
            before = _before(hs, starts, window, g, j, reverse)
            scale = exponent[:, lanes]
            a, found = kernel.factors(x_, r_, i_, before, scale, limit, _FUNCTIONS)
            decays[pl.ds(j * PITCH, GROUP), :] = a
            gradients[pl.ds(j * PITCH, GROUP), :] = dhs[rows, lanes].astype(jnp.float32)
            for ref, factor in zip(factors, found, strict=True):
                ref[pl.ds(j * GROUP, GROUP), :] = factor
        for t in range(GROUP):
            token = pl.ds(_nth(t, GROUP, not reverse), n, stride=PITCH)
            gradient = gradients[token, :] + state
            state = decays[token, :] * gradient
            gradients[token, :] = gradient
        for j in range(n):
            lanes = _lanes(j)
            gradient = gradients[pl.ds(j * PITCH, GROUP), :]
            of_x, of_nu, of_r, of_i = (ref[pl.ds(j * GROUP, GROUP), :] for ref in factors)
            dx[rows, lanes] = (gradient * of_x).astype(dx.dtype)
            di[rows, lanes] = (gradient * of_i).astype(di.dtype)
            dnu_ = gradient * of_nu
            dr[rows, lanes] = (dnu_ * of_r).astype(dr.dtype)
            dnu[:, lanes] += dnu_[:SUBLANES] + dnu_[SUBLANES:]
        return state

    carry[...] = jax.lax.fori_loop(0, groups, group, carry[...])

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        dh[...] = carry[...]


def _before(hs, starts, window, g, j, reverse):
    """The state [GROUP, 128] before each token of group g, of block of lanes j.

    The group's outputs go to a scratch beside their neighbours of the group before, and are read
    from there one row off, which costs no shuffling.
    """
    lanes, base = _lanes(j), j * WINDOW
    groups = hs.shape[0] // GROUP
    own = hs[_rows(g), lanes].astype(jnp.float32)
    neighbours = jnp.minimum(g + 1, groups - 1) if reverse else jnp.maximum(g - 1, 0)
    near = hs[_rows(neighbours), lanes].astype(jnp.float32)
    near = near[:SUBLANES] if reverse else near[SUBLANES:]
    outermost = g == (groups - 1 if reverse else 0)
    start = jnp.broadcast_to(starts[pl.ds(j, 1), :], (SUBLANES, LANES))
    near = jnp.where(outermost, start, near)
    window[pl.ds(base + (0 if reverse else SUBLANES), GROUP), :] = own
    window[pl.ds(base + (GROUP if reverse else 0), SUBLANES), :] = near
    return window[pl.ds(base + (1 if reverse else SUBLANES - 1), GROUP), :]


def _nth(k, count, reverse):
    """The k-th of `count` places in the order of a run."""
    return count - 1 - k if reverse else k


def _rows(g):
    return pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP)


def _lanes(j):
    return pl.ds(j * LANES, LANES)


def _limit(word):
    """The largest log₂ a [GROUP, 128] of each token: CLOSED where the token's bit is set."""
    token = jax.lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 0)
    return kernel.limit_of(jnp.right_shift(word, token) & 1 == 1)


def _reciprocal(z):
    """1/z of ordinary numbers: one step of Newton's, without the care that a plain 1/z takes."""
    guess = pl.reciprocal(z, approx=True)
    return guess * (2 - z * guess)


def _rsqrt(z):
    """1/√z of ordinary numbers, through the hardware's logarithm: a third of the operations."""
    return jnp.exp2(jnp.log(z) * (-0.5 * LOG2E))


def _sqrt(z):
    """√z for 0 ≤ z ≤ 1, likewise; 0 becomes 1e-15."""
    return jnp.exp2(jnp.log(jnp.maximum(z, 1e-30)) * (0.5 * LOG2E))


_FUNCTIONS = kernel.PLAIN._replace(
    reciprocal=_reciprocal, rsqrt=_rsqrt, sqrt=_sqrt, saturates=False
)
