"""What the TPU kernels cost, with no TPU: compiled for a chip, and its schedule of bundles counted.

    python benchmarks/tpu_static.py [--chips v5e v5p v6e] [--only latte] [--json]

Needs `pip install "jax[tpu]"`, whose compiler runs anywhere. A kernel's issue time is its VLIW
bundles, each weighted by the trips of the loops around it, over the clock: waits for memory are not
in it, and both sides of a branch are, so it is an upper bound of the time to issue. Its floor is
every operand and result once at the bandwidth of the memory. "Moves" are the copies, transposes,
pads and fusions of more than 1 MB that XLA puts around the kernels, at that bandwidth. All is for
one core; v4, v5p and TPU7x have two a chip. Clocks and bandwidths are those of `latte plan`.

Arrays are as projections leave them: [B, T, H·N] logits and [B, T, H·D] values, B4 T8192 H16 D128
(RG-LRU: W2048), bfloat16.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from latte.plan.build import NO_TPU
from latte.plan.chips import CHIPS
from latte.plan.program import Program
from latte.plan.schedule import Issue, Schedules, dump_flags

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
BATCH, LENGTH, HEADS, SIZE, WINDOW, WIDTH = 4, 8192, 16, 128, 128, 2048
LEAST_MOVE = 2**20


# --- what is compiled ----------------------------------------------------------------------------


def cases() -> dict[str, tuple[Callable, list]]:
    """Functions of flat arrays, and the shapes that they are compiled for."""
    import jax
    import jax.numpy as jnp

    from latte import ops

    def flat(width: int):
        return jax.ShapeDtypeStruct((BATCH, LENGTH, width), jnp.bfloat16)

    def heads(x):
        return x.reshape(BATCH, LENGTH, HEADS, -1)

    def latte(q, k, v):
        return ops.latte(heads(q), heads(k), heads(v), impl="pallas")[0].reshape(v.shape)

    def macchiato(q, k, qw, kw, v):
        parts = [heads(x) for x in (q, k, v, qw, kw)]
        return ops.macchiato(*parts, window=WINDOW, impl="pallas")[0].reshape(v.shape)

    def rg_lru(x, r, i, lam):
        return ops.rg_lru(x, r, i, lam, impl="pallas")[0]

    forward = {
        "latte_n64": (latte, [flat(HEADS * 64), flat(HEADS * 64), flat(HEADS * SIZE)]),
        "latte_n16": (latte, [flat(HEADS * 16), flat(HEADS * 16), flat(HEADS * SIZE)]),
        "macchiato_n64": (
            macchiato,
            [flat(HEADS * 65), flat(HEADS * 64), *[flat(HEADS * SIZE)] * 3],
        ),
        "macchiato_n16": (
            macchiato,
            [flat(HEADS * 17), flat(HEADS * 16), *[flat(HEADS * SIZE)] * 3],
        ),
        "rg_lru": (rg_lru, [flat(WIDTH)] * 3 + [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)]),
    }
    both = {
        f"{name}_step": (step_of(f), [*arrays, flat(HEADS * SIZE)])
        for name, (f, arrays) in forward.items()
    }
    return forward | both


def step_of(function: Callable) -> Callable:
    """Forward and backward: the outputs, and the gradients that a cotangent of them gives."""
    import jax

    def step(*arrays):
        *inputs, cotangent = arrays
        y, pull = jax.vjp(function, *inputs)
        return y, pull(cotangent)

    return step


# --- the program around the kernels --------------------------------------------------------------

_STILL = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant", "copy-done")


def read_program(hlo: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each kernel's operands and results, and of every large move around them."""
    program = Program(hlo)
    entry = program.computations[program.entry].instructions
    kernels, moves = {}, {}
    for instruction in entry.values():
        total = instruction.bytes
        total += sum(entry[name].bytes for name in instruction.operands if name in entry)
        if instruction.is_kernel:
            kernels[instruction.name] = total
        elif instruction.opcode not in _STILL and total > LEAST_MOVE:
            moves[f"{instruction.opcode} {instruction.name}"] = total
    return kernels, moves


def compile_case(name: str, topology: str) -> None:
    """Compiles one case, in a process of its own because libtpu reads its flags once; prints JSON
    of what the program is. The schedule is dumped beside it."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from latte.ops.dispatch import tracing_for

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    one = SingleDeviceSharding(device)
    with tracing_for("tpu"):
        function, shapes = cases()[name]
        args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=one) for s in shapes]
        compiled = jax.jit(function).lower(*args).compile()
    memory = compiled.memory_analysis()
    kernels, moves = read_program(compiled.as_text() or "")
    temp = memory.temp_size_in_bytes if memory else 0
    print("\n" + json.dumps({"kernels": kernels, "moves": moves, "temp": temp}))


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One kernel of a case: times in milliseconds."""

    name: str
    issue_ms: float
    floor_ms: float
    issue: Issue


@dataclass(frozen=True)
class Cost:
    """One case on one chip; `total_ms` takes the larger of issue time and floor of each kernel."""

    case: str
    chip: str
    total_ms: float
    moves_ms: float
    temp_bytes: int
    kernels: list[Kernel]
    moves: dict[str, int]


def measure(case: str, name: str) -> Cost:
    """Compiles a case for a chip and counts."""
    chip = CHIPS[name]
    bandwidth = chip.bandwidth / chip.cores
    with tempfile.TemporaryDirectory() as dump:
        settings = NO_TPU | {"LIBTPU_INIT_ARGS": dump_flags(Path(dump))}
        command = [sys.executable, __file__, "--compile", case, "--chips", name]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
        if done.returncode:
            raise SystemExit(f"{case} did not compile for {name}:\n{done.stderr[-2000:]}")
        program = json.loads(done.stdout.splitlines()[-1])
        schedule = Schedules(Path(dump))
        kernels = []
        for kernel, size in program["kernels"].items():
            issue = schedule(kernel)
            if issue is None:
                raise SystemExit(f"no schedule of {kernel} was dumped")
            times = 1e3 * issue.cycles / chip.clock, 1e3 * size / bandwidth
            kernels.append(Kernel(kernel, *times, issue))
    moves_ms = 1e3 * sum(program["moves"].values()) / bandwidth
    total = moves_ms + sum(max(k.issue_ms, k.floor_ms) for k in kernels)
    return Cost(case, name, total, moves_ms, program["temp"], kernels, program["moves"])


def show(cost: Cost) -> None:
    """Prints a case, its kernels, and its largest moves."""
    print(
        f"{cost.case:16} {cost.chip:6} {cost.total_ms:8.3f} ms, of which moves "
        f"{cost.moves_ms:.3f}; {cost.temp_bytes / 2**20:.0f} MiB of temporaries"
    )
    for kernel in cost.kernels:
        loops = f", {kernel.issue.unbounded} loops of unknown length" * bool(kernel.issue.unbounded)
        print(
            f"  {kernel.name:32} issue {kernel.issue_ms:8.3f} ms  floor {kernel.floor_ms:7.3f} ms"
            f"  {kernel.issue.bundles} bundles{loops}"
        )
    for move, size in sorted(cost.moves.items(), key=lambda item: -item[1])[:5]:
        print(f"  {move:32} moves {size / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v5e", "v5p", "v6e"])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print JSON, with versions")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_case(options.compile, TOPOLOGIES[options.chips[0]])
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    costs = []
    for case in (name for name in cases() if options.only in name):
        for chip in options.chips:
            costs.append(measure(case, chip))
            if not options.json:
                show(costs[-1])
    if options.json:
        from latte.environment import describe

        rows = [asdict(cost) for cost in costs]
        print(json.dumps({"environment": describe(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
