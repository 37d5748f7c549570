"""RG-LRU on GPU (Pallas, Triton): gates and recurrence in one pass over memory, both ways.

A program owns a few channels of a row of the batch and walks over time in tiles of rows × steps
tokens: its `rows` subsequences of `steps` tokens lie side by side in its threads. Gates are
computed once, at all tokens of a tile; each subsequence is run from zero, with the product of its
decays; a short chain over the rows gives the state in which each begins; and that times the product
of the decays so far is added. The next tile is loaded meanwhile.

Where batch and channels make too few programs to fill the device, the sequence is split over
programs too: a first pass folds each part into one step, a chain over the parts follows, and every
part runs from its own state. That reads the inputs twice.

The gradient G_t = ∂L/∂h_t obeys G_t = ∂L/∂y_t + a_{t+1} G_{t+1}, and all others are G times a
factor of the token's own inputs and h_{t−1}, the output before it.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from latte.ops.kept import keep
from latte.ops.rg_lru import kernel
from latte.ops.rg_lru.xla import linear_recurrence


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernels' tiles; all but `programs` are powers of two.

    width: channels of a program.
    rows: subsequences of a tile.
    steps, backward_steps: tokens of a subsequence, at most 32, each way.
    warps: warps of a program.
    programs: fewer than these leave the device idle, and the sequence is split.
    """

    width: int = 32
    rows: int = 4
    steps: int = 32
    backward_steps: int = 16
    warps: int = 4
    programs: int = 128


class _Static(NamedTuple):
    """What one compilation fixes, besides shapes."""

    reverse: bool
    parts: int
    tiles: Tiles
    interpret: bool


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
    interpret: bool = False,
) -> tuple[Float[Array, "B T W"], Float[Array, "B W"]]:
    """What the definition computes, with its state in float32; `first` marks where documents begin.

    Nothing is copied around the kernels when whole tiles make up T and W; otherwise tokens that
    change nothing and idle channels fill them up.

    Args:
        interpret: True to run without a GPU.
    """
    B, T, W = x.shape
    token = tiles.rows * max(tiles.steps, tiles.backward_steps)
    parts, length = _parts(B, T, W, tiles, token)
    T_, W_ = parts * length, -(-W // tiles.width) * tiles.width
    x, r, i = (
        kernel.pad(kernel.pad(z, 1, T_, fill), 2, W_)
        for z, fill in ((x, 0.0), (r, kernel.IDLE), (i, 0.0))
    )
    first = kernel.pad(first, 1, T_)
    lam, h = kernel.pad(lam, 0, W_), kernel.pad(h, 1, W_)
    static = _Static(reverse, parts, tiles, interpret)
    hs, last = _recurrence(x, r, i, lam, first, h.astype(jnp.float32), static)
    return hs[:, :T, :W], last[:, :W].astype(h.dtype)


def _parts(B, T, W, tiles, tokens):
    """Parts of the sequence that run side by side, and their length, a multiple of `tokens`."""
    programs, count = B * -(-W // tiles.width), -(-T // tokens)
    parts = 1 if programs >= tiles.programs else min(count, -(-2 * tiles.programs // programs))
    each = -(-count // parts)
    return -(-count // each), each * tokens


class _Grid(NamedTuple):
    """The programs of a pass: (blocks of channels, parts, batch), and what each of them sees."""

    batch: int
    parts: int
    count: int  # tiles of a part
    rows: int
    steps: int
    width: int
    channels: int

    def sequence(self) -> pl.BlockSpec:
        """Of an array [B, tiles, rows, steps, W], as `view` makes it."""
        block = (None, self.count, self.rows, self.steps, self.width)
        return pl.BlockSpec(block, lambda w, p, b: (b, p, 0, 0, w))

    def whole(self) -> pl.BlockSpec:
        """Of an array [B, tiles · rows, steps, W]: all of time."""
        block = (None, self.parts * self.count * self.rows, self.steps, self.width)
        return pl.BlockSpec(block, lambda w, p, b: (b, 0, 0, w))

    def flags(self) -> pl.BlockSpec:
        """Of the bits of first tokens [B, tiles, rows]."""
        return pl.BlockSpec((None, self.count, self.rows), lambda w, p, b: (b, p, 0))

    def channel(self) -> pl.BlockSpec:
        """Of an array [W]."""
        return pl.BlockSpec((self.width,), lambda w, p, b: (w,))

    def batched(self) -> pl.BlockSpec:
        """Of an array [B, W]."""
        return pl.BlockSpec((None, self.width), lambda w, p, b: (b, w))

    def part(self) -> pl.BlockSpec:
        """Of an array [B, parts, W]."""
        return pl.BlockSpec((None, None, self.width), lambda w, p, b: (b, p, w))

    def part_shape(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.parts, self.channels), jnp.float32)

    def view(self, z: Array) -> Array:
        """[B, T, …] as [B, tiles, rows, steps, …]."""
        shape = (self.batch, self.parts * self.count, self.rows, self.steps, *z.shape[2:])
        return z.reshape(shape)


def _grid(x, static, steps):
    B, T, W = x.shape
    rows, width = static.tiles.rows, static.tiles.width
    return _Grid(B, static.parts, T // (static.parts * rows * steps), rows, steps, width, W)


def _call(kernel_, grid, static, in_specs, out_specs, out_shape, name):
    functions = kernel.PLAIN if static.interpret else _FUNCTIONS
    return pl.pallas_call(
        functools.partial(kernel_, functions=functions),
        grid=(grid.channels // grid.width, grid.parts, grid.batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=static.tiles.warps, num_stages=1),
        interpret=static.interpret,
        name=name,
    )


def _outputs(x, r, i, lam, first, h, static):
    grid = _grid(x, static, static.tiles.steps)
    sequences = tuple(map(grid.view, (x, r, i)))
    flags, exponent = kernel.pack_bits(grid.view(first)), kernel.decay_exponent(lam)
    starts = _part_starts(_forward_token, flags, sequences, exponent, h, grid, static)
    hs, ends = _call(
        functools.partial(_forward_kernel, reverse=static.reverse),
        grid,
        static,
        [grid.flags(), *[grid.sequence()] * 3, grid.channel(), grid.part()],
        [grid.sequence(), grid.part()],
        [jax.ShapeDtypeStruct(sequences[0].shape, x.dtype), grid.part_shape()],
        "rg_lru",
    )(flags, *sequences, exponent, starts)
    return hs.reshape(x.shape), ends[:, 0 if static.reverse else -1]


def _part_starts(token, flags, sequences, exponent, h, grid, static, *, against=False):
    """The state in which each part begins [B, parts, W]; `against` walks against the op."""
    reverse = static.reverse != against
    if grid.parts == 1:
        return h[:, None]
    products, states = _call(
        functools.partial(_fold_kernel, token=token, reverse=reverse),
        grid,
        static,
        [grid.flags(), grid.channel(), *[grid.sequence()] * len(sequences)],
        [grid.part()] * 2,
        [grid.part_shape()] * 2,
        "rg_lru_fold",
    )(flags, exponent, *sequences)
    ends = linear_recurrence(products, states, h, reverse=reverse)
    if reverse:
        return jnp.concatenate([ends[:, 1:], h[:, None]], axis=1)
    return jnp.concatenate([h[:, None], ends[:, :-1]], axis=1)


def _forward(x, r, i, lam, first, h, static):
    hs, last = keep(_outputs(x, r, i, lam, first, h, static))
    return (hs, last), (x, r, i, lam, first, h, hs)


def _backward(static, residuals, cotangents):
    x, r, i, lam, first, h, hs = residuals
    dhs, dlast = cotangents
    grid = _grid(x, static, static.tiles.backward_steps)
    x_, r_, i_, dhs = map(grid.view, (x, r, i, dhs))
    whole = hs.reshape(grid.batch, -1, grid.steps, grid.channels)
    flags, exponent = kernel.pack_bits(grid.view(first)), kernel.decay_exponent(lam)
    starts = _part_starts(
        _backward_token, flags, (r_, dhs), exponent, dlast, grid, static, against=True
    )
    like = jax.ShapeDtypeStruct(x_.shape, x.dtype)
    dx, dr, di, dnu, ends = _call(
        functools.partial(_backward_kernel, reverse=static.reverse),
        grid,
        static,
        [
            grid.flags(),
            *[grid.sequence()] * 4,
            grid.whole(),
            grid.channel(),
            grid.batched(),
            grid.part(),
        ],
        [*[grid.sequence()] * 3, grid.part(), grid.part()],
        [like, like, like, grid.part_shape(), grid.part_shape()],
        "rg_lru_backward",
    )(flags, x_, r_, i_, dhs, whole, exponent, h, starts)
    dlam = kernel.lam_gradient(dnu.sum((0, 1)), lam)
    dx, dr, di = (d.reshape(x.shape) for d in (dx, dr, di))
    dr, di = dr.astype(r.dtype), di.astype(i.dtype)
    return dx, dr, di, dlam, None, ends[:, -1 if static.reverse else 0]


_recurrence = jax.custom_vjp(_outputs, nondiff_argnames=("static",))
_recurrence.defvjp(_forward, _backward)


def _forward_kernel(flags, x, r, i, exponent, start, hs, end, *, reverse, functions):
    """Writes h at every token of a part, and after its last one."""
    count, rows, steps, width = x.shape
    scale = exponent[...][None]

    def load(n):
        return _load(_nth(n, count, reverse), flags, (x, r, i))

    def tile(n, carry):
        state, (bits, tokens) = carry
        upcoming = load(jnp.minimum(n + 1, count - 1))
        t = _nth(n, count, reverse)
        product, local = _identity(rows, width)
        kept = {}
        for k in _order(steps, reverse):
            a, b = _forward_token(_floats(tokens[k]), scale, _limit(bits, k), functions)
            product, local = a * product, functions.multiply_add(a, local, b)
            kept[k] = product, local
        state, starts = _chain(product, local, state, reverse, functions)
        for k, (product, local) in kept.items():
            hs[t, :, k, :] = functions.multiply_add(product, starts, local).astype(hs.dtype)
        return state, upcoming

    end[...] = jax.lax.fori_loop(0, count, tile, (start[...], load(0)))[0]


def _fold_kernel(flags, exponent, *refs, token, reverse, functions):
    """A part as one step: the product of its decays, and its last state from zero."""
    *sequences, products, states = refs
    count, rows, steps, width = sequences[0].shape
    scale = exponent[...][None]

    def load(n):
        return _load(_nth(n, count, reverse), flags, sequences)

    def tile(n, carry):
        total, state, (bits, tokens) = carry
        upcoming = load(jnp.minimum(n + 1, count - 1))
        product, local = _identity(rows, width)
        for k in _order(steps, reverse):
            a, b = token(_floats(tokens[k]), scale, _limit(bits, k), functions)
            product, local = a * product, functions.multiply_add(a, local, b)
        total, _ = _chain(product, jnp.zeros_like(local), total, reverse, functions)
        state, _ = _chain(product, local, state, reverse, functions)
        return total, state, upcoming

    one, zero = _identity(width)
    products[...], states[...], _ = jax.lax.fori_loop(0, count, tile, (one, zero, load(0)))


def _forward_token(inputs, scale, limit, functions):
    """a and b of h' = a h + b."""
    x, r, i = inputs
    return kernel.step(x, r, i, scale, limit, functions)


def _backward_token(inputs, scale, limit, functions):
    """a and b of q' = a q + b, where q is a_{t+1} G_{t+1} before and a_t G_t after."""
    r, dh = inputs
    _, a = kernel.decay(r, scale, limit, functions)
    return a, a * dh


def _backward_kernel(
    flags, x, r, i, dhs, hs, exponent, h, start, dx, dr, di, dnu, end, *, reverse, functions
):
    """Walks a part against the forward pass, with a_{t+1} G_{t+1} carried; `dnu` sums over it."""
    count, rows, steps, width = x.shape
    scale, origin, base = exponent[...][None], h[...][None], pl.program_id(1) * count

    def load(n):
        t = _nth(n, count, not reverse)
        loaded = _load(t, flags, (x, r, i, dhs))
        return loaded, _before(hs, origin, (base + t) * rows, rows, reverse)

    def tile(n, carry):
        state, sums, ((bits, tokens), before) = carry
        upcoming = load(jnp.minimum(n + 1, count - 1))
        t = _nth(n, count, not reverse)
        product, local = _identity(rows, width)
        kept = {}
        for k in _order(steps, not reverse):
            x_, r_, i_, dh = _floats(tokens[k])
            h_ = before[k].astype(jnp.float32)
            a, factors = kernel.factors(x_, r_, i_, h_, scale, _limit(bits, k), functions)
            gradient = dh + local
            kept[k] = product, gradient, factors
            product, local = a * product, a * gradient
        state, starts = _chain(product, local, state, not reverse, functions)
        for k, (product, gradient, factors) in kept.items():
            gradient = functions.multiply_add(product, starts, gradient)
            dnu_ = gradient * factors.of_nu
            dx[t, :, k, :] = (gradient * factors.of_x).astype(dx.dtype)
            dr[t, :, k, :] = (dnu_ * factors.of_r).astype(dr.dtype)
            di[t, :, k, :] = (gradient * factors.of_i).astype(di.dtype)
            sums = sums + dnu_
        return state, sums, upcoming

    carry = start[...], _identity(rows, width)[1], load(0)
    state, sums, _ = jax.lax.fori_loop(0, count, tile, carry)
    end[...] = state
    dnu[...] = jnp.sum(sums, axis=0)


def _load(t, flags, refs):
    """The bits of first tokens [rows, 1] of tile t, and its tokens [rows, width], as they lie."""
    steps = refs[0].shape[2]
    return flags[t, :][:, None], [tuple(ref[t, :, k, :] for ref in refs) for k in range(steps)]


def _before(hs, origin, base, rows, reverse):
    """The state before every token of the tile whose subsequences begin at `base`, as it lies."""
    count, steps, width = hs.shape
    here = [hs[pl.ds(base, rows), k, :] for k in range(steps)]
    neighbour = (
        base + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0) + (1 if reverse else -1)
    )
    outside = (neighbour < 0) | (neighbour >= count)
    channel = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    place = jnp.clip(neighbour, 0, count - 1)
    edge = hs[place, 0 if reverse else steps - 1, channel].astype(jnp.float32)
    edge = jnp.where(outside, origin, edge)
    return [*here[1:], edge] if reverse else [edge, *here[:-1]]


def _identity(*shape):
    """a and b of the step that changes nothing."""
    return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)


def _floats(values):
    return tuple(z.astype(jnp.float32) for z in values)


def _limit(bits, k):
    """The largest log₂ a [rows, 1] of each row's k-th token: CLOSED where it is a first one."""
    return kernel.limit_of(jnp.right_shift(bits, k) & 1 == 1)


def _chain(product, local, state, reverse, functions):
    """Row after row, state' = product · state + local: the last state, and that before each row."""
    rows, _ = product.shape
    row = jax.lax.broadcasted_iota(jnp.int32, product.shape, 0)
    starts = jnp.zeros_like(product)
    for s in _order(rows, reverse):
        starts = jnp.where(row == s, state[None], starts)
        after = functions.multiply_add(product, jnp.broadcast_to(state, product.shape), local)
        state = jnp.sum(jnp.where(row == s, after, 0.0), axis=0)
    return state, starts


def _order(count, reverse):
    return range(count - 1, -1, -1) if reverse else range(count)


def _nth(k, count, reverse):
    """The k-th of `count` places in the order of a run."""
    return count - 1 - k if reverse else k


def _instruction(name, inputs):
    """A function of float32 arrays of one shape that is one instruction."""
    operands = ", ".join(f"${k}" for k in range(inputs + 1))

    def apply(*args):
        [result] = plgpu.elementwise_inline_asm(
            f"{name}.f32 {operands};",
            args=args,
            constraints="=f" + ",f" * inputs,
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)],
        )
        return result

    return apply


# The compiler would add care for subnormal numbers, and fuse no multiplication with an addition.
_FUNCTIONS = kernel.Functions(
    *(_instruction(f"{name}.approx.ftz", 1) for name in ("ex2", "rcp", "rsqrt", "sqrt")),
    multiply_add=_instruction("fma.rn.ftz", 3),
    saturates=True,
)
