"""Time of each op's chunked form against its definition, a scan over tokens.

    python benchmarks/chunked.py [--lengths 512 2048 8192] [--json]

One row, H 4, N 16, D 64 (W 256 for the RG-LRU, window 128), float32, on this machine's default
device. A time is the least of several runs after one that compiles; "step" is forward and backward.
Every result is compared with the definition's before it is timed.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from latte.environment import describe
from latte.memory import keep_freed_pages
from latte.ops.latte import latte
from latte.ops.macchiato import macchiato
from latte.ops.rg_lru import rg_lru

HEADS, LATENTS, SIZE, WINDOW = 4, 16, 64, 128
WIDTH = HEADS * SIZE
TOLERANCE = 1e-4


def inputs(op: str, length: int) -> list[Array]:
    """Random arrays for one op."""
    shapes = {
        "latte": [(HEADS, LATENTS), (HEADS, LATENTS), (HEADS, SIZE)],
        "macchiato": [(HEADS, LATENTS + 1), (HEADS, LATENTS), *[(HEADS, SIZE)] * 3],
        "rg_lru": [(WIDTH,)] * 3,
    }[op]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, length, *shape)) for shape in shapes]
    if op == "rg_lru":
        arrays.append(rng.normal(size=(WIDTH,)) - 4)
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def forms(op: str, impl: str) -> dict[str, Callable]:
    """The forward pass, and a step: the gradient of the sum of squared outputs by every input."""
    function = {
        "latte": latte,
        "macchiato": partial(macchiato, window=WINDOW),
        "rg_lru": rg_lru,
    }[op]

    def forward(*arrays: Array) -> Array:
        return function(*arrays, impl=impl)[0]

    def loss(*arrays: Array) -> Array:
        return jnp.sum(jnp.square(forward(*arrays)))

    count = {"latte": 3, "macchiato": 5, "rg_lru": 4}[op]
    return {"forward": jax.jit(forward), "step": jax.jit(jax.grad(loss, argnums=range(count)))}


def least_ms(function: Callable, arrays: list[Array], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def check(found: Array, defined: Array) -> None:
    """Raises if the chunked form is not the definition."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(defined), strict=True):
        error = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
        if not error < TOLERANCE:
            raise SystemExit(f"the chunked form differs from the definition by {error:.1e}")


def measure(op: str, length: int, runs: int) -> list[dict]:
    arrays = inputs(op, length)
    chunked, defined = forms(op, "xla"), forms(op, "reference")
    rows = []
    for what in ("forward", "step"):
        check(chunked[what](*arrays), defined[what](*arrays))
        ours, scan = (least_ms(f[what], arrays, runs) for f in (chunked, defined))
        rows.append({"op": op, "length": length, "what": what, "chunked_ms": ours, "scan_ms": scan})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--ops", nargs="+", default=["latte", "macchiato", "rg_lru"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON, with versions and device")
    options = parser.parse_args()
    keep_freed_pages()
    rows = [
        row
        for op in options.ops
        for length in options.lengths
        for row in measure(op, length, options.runs)
    ]
    if options.json:
        print(json.dumps({"environment": describe(), "rows": rows}, indent=1))
        return
    print(f"{'op':10} {'T':>6} {'':8} {'chunked ms':>11} {'scan ms':>9} {'ratio':>6}")
    for row in rows:
        ratio = row["scan_ms"] / row["chunked_ms"]
        print(
            f"{row['op']:10} {row['length']:6} {row['what']:8} {row['chunked_ms']:11.2f} "
            f"{row['scan_ms']:9.2f} {ratio:6.1f}"
        )


if __name__ == "__main__":
    main()
