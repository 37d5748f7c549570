"""Every op in every implementation, and its peers, on the same arrays: time, floor and error.

    python benchmarks/kernels.py [--ops latte rg_lru] [--lengths 2048 8192] [--scan] [--json FILE]
    python benchmarks/kernels.py --plot times.png --lengths 1024 2048 … 131072

32,768 tokens whatever the length, in bfloat16: Latte H16 N64 (and N16) D128, Macchiato the same
with a window of 128, RG-LRU W2048, attention H16 D128; the cross-entropy of width 1,024 over 50,304
words. "Step" is forward and backward. Every output and gradient is compared with the definition, in
float32, before it is timed; what is printed is the largest error of them, norm over norm. Floors
are the time that a copy takes for the arrays that must move, and a large product for the arithmetic
of the definition, both timed in this process. cuDNN's attention runs beside, flash-linear-attention
where it is installed (`peers.py`), and with --scan Latte as the paper computes it, one token after
another.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

# Before JAX takes its memory: the definitions want much, and torch some for the peers.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")

import jax
import jax.numpy as jnp
import numpy as np
import peers
from jaxtyping import Array
from timing import copy_rate, milliseconds, product_rate

from latte import ops
from latte.environment import describe
from latte.ops.macchiato import parts

TOKENS, HEADS, SIZE, WINDOW, WIDTH = 32768, 16, 128, 128, 2048
FLOPS = 4.0 * TOKENS * HEADS * SIZE
"""Of all tokens for each latent, or each key: one product with values in, and one out."""
IMPLS = ["xla", "pallas", "parts", "cudnn", "chunked", "plain"]
TOLERANCE = 3e-2
"""Norm over norm, of bfloat16 against float32."""


@dataclass(frozen=True)
class Case:
    """One implementation on one shape; `flops` is the arithmetic of its definition, forward."""

    op: str
    impl: str
    length: int
    function: Callable
    arrays: list[Array]
    definition: Callable
    flops: float


@dataclass(frozen=True)
class Row:
    """Times in milliseconds; `error` is the largest of outputs and gradients."""

    op: str
    impl: str
    length: int
    what: str
    ms: float
    memory_ms: float
    product_ms: float
    temp_bytes: int
    error: float


# --- cases ---------------------------------------------------------------------------------------


def random(*shapes: tuple[int, ...]) -> list[Array]:
    """Normal numbers as bfloat16."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32).astype(jnp.bfloat16) for s in shapes]


def forms(
    op: str, length: int, arrays: list[Array], flops: float, function: Callable, *impls: str
) -> Iterator[Case]:
    """One of our ops in some of its implementations."""

    def impl_of(name: str) -> Callable:
        return lambda *arrays: function(*arrays, impl=name)[0]

    for impl in impls:
        yield Case(op, impl, length, impl_of(impl), arrays, impl_of("reference"), flops)


def definition_at(length: int) -> str:
    """The definition of a window holds all pairs of tokens: too many ones leave blocks instead."""
    return "reference" if length <= 2048 else "xla"


def latte_cases(length: int, latents: int) -> Iterator[Case]:
    rows = TOKENS // length, length, HEADS
    arrays = random((*rows, latents), (*rows, latents), (*rows, SIZE))
    impls = "xla", "pallas", "reference"
    yield from forms(f"latte N{latents}", length, arrays, FLOPS * latents, ops.latte, *impls)


def macchiato_cases(length: int) -> Iterator[Case]:
    rows = TOKENS // length, length, HEADS
    arrays = random((*rows, 65), (*rows, 64), *[(*rows, SIZE)] * 3)
    flops = FLOPS * (64 + WINDOW)

    def macchiato(impl: str) -> Callable:
        return lambda *arrays: ops.macchiato(*arrays, window=WINDOW, impl=impl)[0]

    def separate(*arrays: Array) -> Array:
        return parts(*arrays, window=WINDOW)[0]

    functions = {"xla": macchiato("xla"), "parts": separate, "pallas": macchiato("pallas")}
    definition = macchiato(definition_at(length))
    for impl, function in functions.items():
        yield Case("macchiato", impl, length, function, arrays, definition, flops)


def rg_lru_cases(length: int) -> Iterator[Case]:
    arrays = random(*[(TOKENS // length, length, WIDTH)] * 3)
    arrays.append(jnp.asarray(np.random.default_rng(1).normal(size=WIDTH) - 4, jnp.float32))
    yield from forms("rg_lru", length, arrays, 0.0, ops.rg_lru, "xla", "pallas")


def attention_cases(length: int, window: int | None) -> Iterator[Case]:
    arrays = random(*[(TOKENS // length, length, HEADS, SIZE)] * 3)
    flops = FLOPS * (window or length / 2)

    def attention(impl: str) -> Callable:
        return lambda *arrays: ops.attention(*arrays, window=window, impl=impl)[0]

    functions = {"xla": attention("xla"), "pallas": attention("pallas")}
    if jax.default_backend() == "gpu":
        functions["cudnn"] = attention("cudnn")
    definition = attention(definition_at(length))
    name = "attention" if window is None else f"attention W{window}"
    for impl, function in functions.items():
        yield Case(name, impl, length, function, arrays, definition, flops)


def cross_entropy_cases(length: int) -> Iterator[Case]:
    rows = TOKENS // length, length
    hidden, table = random((*rows, 1024), (50_304, 1024))
    targets = jnp.asarray(np.random.default_rng(2).integers(0, 50_304, rows))

    def chunked(hidden: Array, table: Array) -> Array:
        return ops.cross_entropy(hidden, table, targets, jnp.ones(rows)).loss

    def plain(hidden: Array, table: Array) -> Array:
        logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
        seen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - seen)

    flops = 2.0 * TOKENS * table.size
    for impl, function in {"chunked": chunked, "plain": plain}.items():
        yield Case("cross-entropy", impl, length, function, [hidden, table], plain, flops)


CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "latte": partial(latte_cases, latents=64),
    "latte_n16": partial(latte_cases, latents=16),
    "macchiato": macchiato_cases,
    "rg_lru": rg_lru_cases,
    "attention": partial(attention_cases, window=None),
    "window": partial(attention_cases, window=WINDOW),
    "cross_entropy": cross_entropy_cases,
}


# --- measuring -----------------------------------------------------------------------------------


def passes(function: Callable) -> dict[str, Callable]:
    """The forward pass, and forward and backward from a given cotangent."""

    def step(cotangent: Array, *arrays: Array) -> tuple:
        y, pull = jax.vjp(function, *arrays)
        return y, pull(cotangent)

    return {"forward": lambda _, *arrays: function(*arrays), "step": step}


def largest_error(found: tuple, defined: tuple) -> float:
    """Of outputs and gradients, norm over norm."""

    def error(a: Array, b: Array) -> float:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(defined), strict=True)
    return max(error(a, b) for a, b in pairs)


def floors(
    inputs: int, output: int, flops: float, what: str, rates: tuple[float, float]
) -> tuple[float, float]:
    """Milliseconds of a copy of the bytes that must move, and of a product for the arithmetic.

    Forward inputs and output move once; backward the inputs, the cotangent and the gradients too.
    `rates` are bytes and operations a second, `flops` those of the forward pass.
    """
    forward = what == "forward"
    least = inputs + output if forward else 3 * inputs + 2 * output
    return 1e3 * least / rates[0], 1e3 * flops * (1 if forward else 3) / rates[1]


def measure(case: Case, defined: dict, rates: tuple[float, float], calls: int) -> Iterator[Row]:
    """Checks a case against its definition, then times it. `defined` holds what that gave."""
    y = jax.eval_shape(case.function, *case.arrays)
    cotangent = random(y.shape)[0].astype(y.dtype)
    given = [cotangent, *case.arrays]
    ours = {what: jax.jit(f).lower(*given).compile() for what, f in passes(case.function).items()}
    if case.op not in defined:
        wide = [a.astype(jnp.float32) for a in given]
        defined[case.op] = jax.jit(passes(case.definition)["step"])(*wide)
    error = largest_error(ours["step"](*given), defined[case.op])
    if not error < TOLERANCE:
        raise SystemExit(f"{case.op} {case.impl} T={case.length}: wrong by {error:.1e}")
    inputs = sum(a.nbytes for a in case.arrays)
    for what, function in ours.items():
        memory = function.memory_analysis()
        copy_ms, product_ms = floors(inputs, cotangent.nbytes, case.flops, what, rates)
        yield Row(
            case.op,
            case.impl,
            case.length,
            what,
            ms=milliseconds(function, *given, calls=calls),
            memory_ms=copy_ms,
            product_ms=product_ms,
            temp_bytes=memory.temp_size_in_bytes if memory else 0,
            error=error,
        )


def measure_peer(
    peer: peers.Peer, length: int, flops: float, rates: tuple[float, float], calls: int
) -> Iterator[Row]:
    """The same for a kernel of another project; its memory is not known."""
    error = peers.largest_error(peer)
    if not error < TOLERANCE:
        raise SystemExit(f"{peer.name} T={length}: wrong by {error:.1e}")
    for what, ms, inputs, output in peers.times(peer, TOKENS // length, length, calls):
        copy_ms, product_ms = floors(inputs, output, flops, what, rates)
        yield Row(peer.op, peer.name, length, what, ms, copy_ms, product_ms, 0, error)


def draw(rows: list[Row], out: Path) -> None:
    """Time of a step against the length, at a constant number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    steps = [row for row in rows if row.what == "step"]
    for name in dict.fromkeys((row.op, row.impl) for row in steps):
        line = [(row.length, row.ms) for row in steps if (row.op, row.impl) == name]
        axes.plot(*zip(*line, strict=True), "o-", ms=4, label=" ".join(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"length T ({TOKENS:,} tokens in all)")
    axes.set_ylabel("forward and backward (ms)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=150)


def show(row: Row) -> None:
    floors = f"{row.ms / row.memory_ms:6.1f} × a copy's {row.memory_ms:.3f}"
    if row.product_ms:
        floors += f", {row.ms / row.product_ms:6.1f} × a product's {row.product_ms:.3f}"
    print(
        f"{row.op:14} {row.impl:8} T {row.length:6} {row.what:8} {row.ms:9.3f} ms  {floors}"
        f"  {row.temp_bytes / 2**20:.0f} MiB  error {row.error:.1e}",
        flush=True,
    )


def measure_all(options: argparse.Namespace, rates: tuple[float, float]) -> Iterator[Row]:
    others = peers.peers(HEADS, 64, SIZE, WIDTH) if peers.available() else {}
    for length, name in itertools.product(options.lengths, options.ops):
        defined: dict = {}
        for case in CASES[name](length):
            if case.impl in options.impls or (case.impl == "reference" and options.scan):
                yield from measure(case, defined, rates, options.calls)
        if name in others:
            flops = FLOPS * 64 if name == "latte" else 0.0
            yield from measure_peer(others[name], length, flops, rates, options.calls)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=IMPLS)
    parser.add_argument("--calls", type=int, default=10, help="calls that are timed together")
    parser.add_argument("--scan", action="store_true", help="time Latte's recurrence too (minutes)")
    parser.add_argument("--plot", type=Path, help="draw the steps into this file")
    parser.add_argument("--json", type=Path, help="write figures, versions and device to this file")
    options = parser.parse_args()
    copied, multiplied, rows = copy_rate(options.calls), product_rate(options.calls), []
    print(f"copies at {copied / 1e9:.0f} GB/s, multiplies at {multiplied / 1e12:.0f} TFLOP/s")
    try:
        for row in measure_all(options, (copied, multiplied)):
            rows.append(row)
            show(row)
    finally:
        if options.plot:
            draw(rows, options.plot)
        if options.json:
            rates = {"copy_gb_per_second": copied / 1e9, "product_tflops": multiplied / 1e12}
            found = {"environment": describe(), **rates, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
