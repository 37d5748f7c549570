"""A compiled program, read from its HLO text: computations, loops and their trips, bytes, products.

TPU HLO prints no trip count: a loop's condition compares its counter with a constant, from which
the trips follow. Arrays whose layout says S(n) are not in the HBM (S(1) is the vector memory).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "f64": 8}
"""Other types take four bytes."""
_INNER = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """One array of a type."""

    kind: str
    shape: tuple[int, ...]
    in_hbm: bool

    @property
    def bytes(self) -> int:
        return prod(self.shape) * _BYTES.get(self.kind, 4)


def arrays_of(type_text: str) -> list[Array]:
    """The arrays of an HLO type; a tuple has several."""
    return [
        Array(kind, tuple(map(int, filter(None, shape.split(",")))), "S(" not in (layout or ""))
        for kind, shape, layout in _ARRAY.findall(type_text)
    ]


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `rest` is all that stands behind the operands."""

    name: str
    type_text: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    rest: str
    is_root: bool

    @cached_property
    def arrays(self) -> list[Array]:
        return arrays_of(self.type_text)

    @property
    def bytes(self) -> int:
        """Of what it gives, wherever that lies."""
        return sum(array.bytes for array in self.arrays)

    @property
    def inner(self) -> str | None:
        """The computation that a fusion or an asynchronous start wraps."""
        found = _INNER.search(self.rest)
        return found[1] if found else None

    def attribute(self, name: str) -> str | None:
        """Of `name=value` behind the operands."""
        found = re.search(rf"\b{name}=(\{{.*?\}}|[^\s,]+)", self.rest)
        return found[1] if found else None

    @property
    def is_kernel(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.rest


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they are run."""

    name: str
    instructions: dict[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """By the name of what they use."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                found.setdefault(name, []).append(instruction)
        return found


@dataclass(frozen=True)
class Visit:
    """A computation that runs by itself, how often a step runs it, and the loops around it."""

    computation: Computation
    times: int
    loops: tuple[str, ...]


class Program:
    """Computations by name."""

    def __init__(self, hlo: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.unbounded: list[str] = []
        """Loops whose trips are not in the text: they count once."""
        lines: dict[str, Instruction] = {}
        for line in hlo.splitlines():
            header = _HEADER.match(line)
            if header:
                lines = {}
                self.computations[header[2]] = Computation(header[2], lines)
                self.entry = header[2] if header[1] else self.entry
                continue
            m = _INSTRUCTION.match(line)
            if m:
                names = tuple(re.findall(r"%([\w.\-]+)", m[5]))
                lines[m[2]] = Instruction(m[2], m[3], m[4], names, m[5], m[6], bool(m[1]))

    def visits(self) -> Iterator[Visit]:
        """Every computation that is not part of an instruction, from the entry on."""
        yield from self._visit(self.entry, 1, ())

    def _visit(self, name: str, times: int, loops: tuple[str, ...]) -> Iterator[Visit]:
        computation = self.computations[name]
        yield Visit(computation, times, loops)
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                body = (instruction.attribute("body") or "").lstrip("%")
                trips = self.trips(computation, instruction)
                yield from self._visit(body, times * trips, (*loops, instruction.name))
            elif instruction.opcode == "conditional":
                for branch in self._branches(instruction):
                    yield from self._visit(branch, times, loops)
            elif instruction.opcode == "call" and instruction.inner:
                yield from self._visit(instruction.inner, times, loops)

    def _branches(self, instruction: Instruction) -> list[str]:
        """All of them: an upper bound, as only one runs."""
        listed = re.search(r"branch_computations=\{(.*?)\}", instruction.rest)
        if listed:
            return re.findall(r"%([\w.\-]+)", listed[1])
        return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", instruction.rest)

    def trips(self, around: Computation, loop: Instruction) -> int:
        """Of a loop that counts from a constant up to one by a constant."""
        condition = self.computations[(loop.attribute("condition") or "").lstrip("%")]
        limit, counter = self._limit(condition)
        if limit is None:
            self.unbounded.append(loop.name)
            return 1
        start = self._start(around, loop, counter) or 0
        step = self._step(self.computations[(loop.attribute("body") or "").lstrip("%")], counter)
        return max(0, -(-(limit - start) // step))

    def _limit(self, condition: Computation) -> tuple[int | None, int]:
        """The constant that the counter is compared with, and which part of the state counts."""
        compared = condition.root
        parts = [condition.instructions.get(name) for name in compared.operands]
        if compared.opcode == "fusion" and compared.inner:
            compared = self.computations[compared.inner].root
        limit, counter = None, 0
        for part in parts:
            if (
                part is not None
                and part.opcode == "constant"
                and part.literal.lstrip("-").isdigit()
            ):
                limit = int(part.literal)
            elif part is not None and part.opcode == "get-tuple-element":
                counter = int(part.attribute("index") or 0)
        if limit is None or compared.opcode != "compare":
            return None, counter
        direction = compared.attribute("direction")
        return {"LT": limit, "LE": limit + 1, "NE": limit}.get(direction or ""), counter

    def _start(self, around: Computation, loop: Instruction, counter: int) -> int | None:
        state = around.instructions.get(loop.operands[0])
        if state is None or state.opcode != "tuple":
            return None
        value = around.instructions.get(state.operands[counter])
        while value is not None and value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            value = around.instructions.get(value.operands[0])
        known = value is not None and value.opcode == "constant" and value.literal.isdigit()
        return int(value.literal) if value is not None and known else None

    def _step(self, body: Computation, counter: int) -> int:
        value = body.instructions.get(body.root.operands[counter])
        if value is None or value.opcode != "add":
            return 1
        steps = (body.instructions.get(name) for name in value.operands)
        found = [int(s.literal) for s in steps if s and s.opcode == "constant"]
        return found[0] if found else 1

    # --- what an instruction does -----------------------------------------------------------

    def within(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions that a fusion or an asynchronous start is made of, however nested."""
        if instruction.inner is None or instruction.inner not in self.computations:
            return
        inner = self.computations[instruction.inner]
        for part in inner.instructions.values():
            yield inner, part
            if part.opcode in ("fusion", "async-start"):
                yield from self.within(part)

    def flops(self, computation: Computation, instruction: Instruction) -> int:
        """Of the products in it; a TPU program has them as convolutions."""
        own = [(computation, instruction), *self.within(instruction)]
        return sum(product_flops(where, part) for where, part in own)

    def hbm_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """What it reads of the HBM and writes there; of an array that it cuts, the part."""
        if instruction.opcode in ("slice-start", "copy-start"):
            return _moved(instruction)
        inner = self.computations.get(instruction.inner or "")
        if instruction.opcode == "fusion" and inner is not None:
            return self._fusion_bytes(computation, instruction, inner)
        operands = (computation.instructions.get(name) for name in instruction.operands)
        read = sum(a.bytes for o in operands if o for a in o.arrays if a.in_hbm)
        written = sum(a.bytes for a in instruction.arrays if a.in_hbm)
        if instruction.opcode == "dynamic-slice":
            return 2 * written
        if instruction.opcode == "dynamic-update-slice":
            update = computation.instructions.get(instruction.operands[1])
            return 2 * update.bytes if update else 0
        return read + written

    def _fusion_bytes(
        self, computation: Computation, instruction: Instruction, inner: Computation
    ) -> int:
        total = 0
        for part in inner.instructions.values():
            if part.opcode != "parameter":
                continue
            given = computation.instructions.get(instruction.operands[int(part.literal)])
            if given is not None and any(a.in_hbm for a in given.arrays):
                total += _read_of(inner, part)
        roots = [inner.root]
        if inner.root.opcode == "tuple":
            roots = [inner.instructions[name] for name in inner.root.operands]
        for root, array in zip(roots, instruction.arrays, strict=False):
            if array.in_hbm:
                total += _written_by(inner, root)
        return total


def _moved(instruction: Instruction) -> int:
    """Bytes of a copy or slice on its way: of the part that is moved, at the ends in the HBM."""
    source, target = instruction.arrays[:2]
    if instruction.opcode == "copy-start":
        source, target = target, source
    return target.bytes * (source.in_hbm + target.in_hbm)


def _read_of(inner: Computation, parameter: Instruction) -> int:
    """What a fusion reads of a parameter."""
    users = inner.users.get(parameter.name, [])
    if users and all(u.opcode in ("dynamic-slice", "slice") for u in users):
        return sum(u.bytes for u in users)
    if users and all(
        u.opcode == "dynamic-update-slice" and u.operands[0] == parameter.name for u in users
    ):
        return 0  # it is written in place
    return parameter.bytes


def _written_by(inner: Computation, root: Instruction) -> int:
    while root.opcode in ("bitcast", "copy") and root.operands:
        root = inner.instructions[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return inner.instructions[root.operands[1]].bytes
    return root.bytes


# --- products ------------------------------------------------------------------------------------


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """Two for each product of elements, padding left out; 0 for anything but a product."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    left, right = (computation.instructions[name].arrays[0].shape for name in instruction.operands)
    out = instruction.arrays[0].shape
    if instruction.opcode == "dot":
        contracted = instruction.attribute("lhs_contracting_dims") or "{}"
        return 2 * prod(out) * prod(left[int(d)] for d in re.findall(r"\d+", contracted))
    names = instruction.attribute("dim_labels") or ""
    of_left, of_right, of_out = re.split(r"_|->", names)
    total = 2 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    windows = _windows(instruction)
    for label in filter(str.isdigit, of_out):
        axis = int(label)
        window = {key: values[axis] for key, values in windows.items() if axis < len(values)}
        size = right[of_right.index(label)]
        total *= _pairs(left[of_left.index(label)], size, out[of_out.index(label)], window)
    groups = int(instruction.attribute("batch_group_count") or 1)
    return total // groups


def _windows(instruction: Instruction) -> dict[str, list[str]]:
    text = (instruction.attribute("window") or "{}").strip("{}")
    return {key: values.split("x") for key, values in re.findall(r"(\w+)=(\S+)", text)}


def _pairs(size: int, taps: int, out: int, window: dict[str, str]) -> int:
    """Pairs of an output position and a tap that meet an element, neither padding nor a gap."""
    stride, low = int(window.get("stride", 1)), int(window.get("pad", "0").split("_")[0])
    gap, spread = int(window.get("lhs_dilate", 1)), int(window.get("rhs_dilate", 1))
    last = (size - 1) * gap
    return sum(
        1
        for position in range(out)
        for tap in range(taps)
        for at in [position * stride + tap * spread - low]
        if 0 <= at <= last and at % gap == 0
    )
