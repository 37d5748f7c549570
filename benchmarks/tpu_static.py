"""What the TPU kernels cost, with no TPU: compiled for a chip, and its schedule of bundles counted.

    python benchmarks/tpu_static.py [--chips v5e v5p v6e] [--only latte] [--json]

Needs `pip install "jax[tpu]"`, whose compiler runs anywhere. A kernel's issue time is its VLIW
bundles, each weighted by the trips of the loops around it, over the clock: waits for memory are not
in it, and both sides of a branch are, so it is an upper bound of the time to issue. Its floor is
every operand and result once at the bandwidth of the memory. "Moves" are the copies, transposes,
pads and fusions of more than 1 MB that XLA puts around the kernels, at that bandwidth. All is for
one core; v4, v5p and TPU7x have two a chip.

Arrays are as projections leave them: [B, T, H·N] logits and [B, T, H·D] values, B4 T8192 H16 D128
(RG-LRU: W2048), bfloat16.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chip:
    """One core. Clocks and bandwidths are the vendor's published figures, halved where a chip has
    two cores."""

    topology: str
    clock: float
    bandwidth: float


CHIPS = {
    "v4": Chip("v4:2x2x1", 1.05e9, 1.228e12 / 2),
    "v5e": Chip("v5e:2x2", 0.94e9, 0.819e12),
    "v5p": Chip("v5p:2x2x1", 1.75e9, 2.765e12 / 2),
    "v6e": Chip("v6e:2x2", 1.75e9, 1.64e12),
    "tpu7x": Chip("tpu7x:2x2x1", 1.9e9, 7.38e12 / 2),
}
BATCH, LENGTH, HEADS, SIZE, WINDOW, WIDTH = 4, 8192, 16, 128, 128, 2048
LEAST_MOVE = 2**20
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
"""Other types take four bytes."""


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


# --- the schedule --------------------------------------------------------------------------------

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{(\})?(.*)", re.M)
_BOUND = re.compile(r"totalorder %s\S+, (\d+) /\* loop exit test")


@dataclass
class _Loop:
    depth: int
    cycles: int = 0
    bound: int | None = None


@dataclass(frozen=True)
class Issue:
    """Bundles in the text, the same weighted by loop trips, and loops whose bound is no constant
    (which count once)."""

    bundles: int
    cycles: int
    unbounded: int


def count_bundles(listing: str) -> Issue:
    """Counts a listing of scheduled bundles (final_bundles.txt).

    A line is `address TAG : >> { … }`, with a > for each loop around it and LB where one begins.
    """
    bundles, unbounded = 0, 0
    stack = [_Loop(-1)]

    def close() -> int:
        loop = stack.pop()
        stack[-1].cycles += loop.cycles * (loop.bound or 1)
        return loop.bound is None

    for begins, depth, rest in _bundles(listing):
        while len(stack) > 1 and (stack[-1].depth > depth or (begins and stack[-1].depth == depth)):
            unbounded += close()
        if begins:
            stack.append(_Loop(depth))
        bundles += 1
        stack[-1].cycles += 1
        bound = _BOUND.search(rest)
        if bound:
            stack[-1].bound = int(bound[1])
    while len(stack) > 1:
        unbounded += close()
    return Issue(bundles, stack[0].cycles, unbounded)


def _bundles(listing: str) -> Iterator[tuple[bool, int, str]]:
    """Whether a loop begins at a bundle, the loops around it, and its text; in order."""
    depth = 0
    lines = list(_BUNDLE.finditer(listing))
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        empty = line[3] is not None and not line[2]
        depth = depth if empty else len(line[2])  # an empty bundle is printed without its depth
        yield line[1] == "LB", depth, listing[line.start(4) : after.start() if after else None]


# --- the program around the kernels --------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)$", re.M)
_STILL = ("parameter", "bitcast", "tuple", "get-tuple-element", "constant", "copy-done")


def array_bytes(type_text: str) -> int:
    """Bytes of an HLO type, a tuple's parts together."""
    total = 0
    for kind, dimensions in re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", type_text):
        size = ITEM_BYTES.get(kind, 4)
        for d in filter(None, dimensions.split(",")):
            size *= int(d)
        total += size
    return total


def read_program(hlo: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each kernel's operands and results, and of every large move around them."""
    entry = hlo[hlo.index("\nENTRY ") :]
    sizes = {m[1]: array_bytes(m[2]) for m in _INSTRUCTION.finditer(entry)}
    kernels, moves = {}, {}
    for m in _INSTRUCTION.finditer(entry):
        operands = [name.strip().lstrip("%") for name in m[4].split(",")]
        total = sizes[m[1]] + sum(sizes.get(name, 0) for name in operands)
        if "tpu_custom_call" in m[5]:
            kernels[m[1]] = total
        elif m[3] not in _STILL and total > LEAST_MOVE:
            moves[f"{m[3]} {m[1]}"] = total
    return kernels, moves


def compile_case(name: str, chip: Chip) -> None:
    """Compiles one case, in a process of its own because libtpu reads its flags once; prints JSON
    of what the program is. The schedule is dumped beside it."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from latte.ops.dispatch import tracing_for

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]
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
    with tempfile.TemporaryDirectory() as dump:
        settings = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5p-16",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, __file__, "--compile", case, "--chips", name]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
        if done.returncode:
            raise SystemExit(f"{case} did not compile for {name}:\n{done.stderr[-2000:]}")
        program = json.loads(done.stdout.splitlines()[-1])
        kernels = [
            Kernel(kernel, 1e3 * issue.cycles / chip.clock, 1e3 * size / chip.bandwidth, issue)
            for kernel, size in program["kernels"].items()
            for issue in [count_bundles(_listing(Path(dump), kernel))]
        ]
    moves_ms = 1e3 * sum(program["moves"].values()) / chip.bandwidth
    total = moves_ms + sum(max(k.issue_ms, k.floor_ms) for k in kernels)
    return Cost(case, name, total, moves_ms, program["temp"], kernels, program["moves"])


def _listing(dump: Path, kernel: str) -> str:
    """The schedule that was dumped for a kernel."""
    for path in sorted(dump.glob("*-final_bundles.txt")):
        if re.fullmatch(rf"\d+-{re.escape(kernel)}-\d+-final_bundles.txt", path.name):
            return path.read_text()
    raise SystemExit(f"no schedule of {kernel} was dumped")


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
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v5e", "v5p", "v6e"])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print JSON, with versions")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_case(options.compile, CHIPS[options.chips[0]])
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
