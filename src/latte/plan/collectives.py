"""What a program sends between devices: how much, over which axes of the mesh, and how long.

Ring algorithms: of n devices that share an array of S bytes, each sends (n − 1)/n · S to gather or
scatter it, or to exchange parts of it, twice that to reduce it everywhere, and S to hand it on. A
group that spans d dimensions of the torus uses all their links at once, two a dimension where it
closes to a ring: 2d links of a v5e slice's full side. Between slices the same bytes cross the
network, each chip with its share; what is inside comes before and after.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from latte.plan.chips import Topology
from latte.plan.program import Computation, Instruction, Program

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)


@dataclass(frozen=True)
class Place:
    """Where a device of the mesh is: its coordinates in the torus, and its slice."""

    coordinates: tuple[int, ...]
    slice: int


@dataclass(frozen=True)
class Layout:
    """Devices in the mesh's order; `axes` are its names and sizes."""

    axes: dict[str, int]
    places: list[Place]
    topology: Topology

    def axes_of(self, group: list[int]) -> tuple[str, ...]:
        """The mesh axes along which a group's devices differ."""
        index = np.unravel_index(group, tuple(self.axes.values()))
        return tuple(
            name for name, at in zip(self.axes, index, strict=True) if len(set(at.tolist())) > 1
        )

    def links(self, group: list[int]) -> int:
        """Links that a device of a group sends over at once."""
        at = [self.places[member].coordinates for member in group]
        chip, found = self.topology.chip, 0
        for dimension, size in enumerate(self.topology.shape):
            span = len({place[dimension] for place in at})
            # Wrap-around links: of whole v5e and v6e sides of 16, of v4 and later cubes' sides.
            closed = span == size and size % (16 if chip.dimensions == 2 else 4) == 0
            found += 0 if span == 1 else 2 if closed else 1
        return max(found, 1)

    def slices(self, group: list[int]) -> int:
        return len({self.places[member].slice for member in group})


@dataclass(frozen=True)
class Collective:
    """One collective: what each device sends, and the time at the links' published bandwidth.

    hidden: the compiler lets it run beside other work.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    hidden: bool


def collectives_of(
    program: Program, computation: Computation, layout: Layout
) -> Iterator[tuple[Instruction, Collective]]:
    """The collectives of a computation, each with the instruction that it first stands in.

    One that is cut into steps, fused with several products, stands in the text once for each; all
    have its channel.
    """
    seen: dict[str, tuple[Instruction, Instruction, bool]] = {}
    steps: dict[str, int] = {}
    for outer in computation.instructions.values():
        wrapped = outer.opcode in ("fusion", "async-start")
        parts = [part for _, part in program.within(outer)] if wrapped else [outer]
        scattered = wrapped and (outer.inner or "").startswith("all-reduce-scatter")
        for part in parts:
            if part.opcode.removesuffix("-start") not in KINDS:
                continue
            channel = part.attribute("channel_id") or part.name
            steps[channel] = steps.get(channel, 0) + 1
            seen.setdefault(channel, (outer, part, scattered))
    for channel, (outer, part, scattered) in seen.items():
        hidden = steps[channel] > 1 or "start" in part.opcode + outer.opcode
        yield outer, _price(part, layout, scattered, hidden)


def _price(part: Instruction, layout: Layout, scattered: bool, hidden: bool) -> Collective:
    kind = part.opcode.removesuffix("-start")
    if kind == "collective-permute":
        return _permute(part, layout, hidden)
    group = first_group(part, prod(layout.axes.values()))
    n = len(group)
    sizes = [array.bytes for array in part.arrays]
    whole = max(sizes) if part.opcode == "all-gather-start" else sum(sizes)
    if kind == "reduce-scatter":
        whole *= n
    if scattered:
        kind = "reduce-scatter"
    rounds = 2 if kind == "all-reduce" else 1
    sent = round(rounds * whole * (n - 1) / n)
    slices, chip = layout.slices(group), layout.topology.chip
    inside = n // slices
    seconds = rounds * whole * (inside - 1) / inside / (layout.links(group) * chip.link)
    if slices > 1:
        # Every chip of a slice takes its share of the array over the network.
        seconds += rounds * whole / inside * (slices - 1) / slices / chip.network
    return Collective(kind, layout.axes_of(group), sent, seconds, hidden)


def _permute(part: Instruction, layout: Layout, hidden: bool) -> Collective:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?", part.rest)
    ends = list(map(int, re.findall(r"\d+", pairs[1]))) if pairs else [0, 0]
    size = part.arrays[0].bytes
    group = ends[:2]
    chip = layout.topology.chip
    bandwidth = chip.network if layout.slices(group) > 1 else chip.link
    return Collective("collective-permute", layout.axes_of(group), size, size / bandwidth, hidden)


# --- who takes part --------------------------------------------------------------------------


def first_group(part: Instruction, devices: int) -> list[int]:
    """The first of the groups of devices that exchange, by their places in the mesh.

    They are written as lists, as an iota that is transposed, or as axes of a mesh of their own.
    """
    text = part.rest.partition("replica_groups=")[2]
    named = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", text)
    if named:
        return _named_group(named[1], named[2], named[3])
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, dims = ([int(d) for d in found.split(",")] for found in (iota[1], iota[2]))
        order = np.arange(prod(dims)).reshape(dims)
        if iota[3]:
            order = order.transpose([int(d) for d in iota[3].split(",")])
        return order.reshape(shape)[0].tolist()
    listed = re.match(r"\{\{([\d,]+)\}", text)
    return [int(d) for d in listed[1].split(",")] if listed else list(range(devices))


def _named_group(axes: str, order: str | None, used: str) -> list[int]:
    """`'a'=2,'b'=4`, the devices' order if it is not plain, and the axes that a group spans.

    An axis may be cut: `'b':(2)2` is the part of size 2 that comes after one of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    strides, stride = {}, 1
    for name, size in reversed(sizes.items()):
        strides[name], stride = stride, stride * size
    steps = []
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", used):
        size = int(part or sizes[name])
        inner = sizes[name] // (int(before or 1) * size)
        steps.append([i * inner * strides[name] for i in range(size)])
    members = [sum(offsets) for offsets in product(*steps)]
    if order is None:
        return members
    devices = _device_order(order)
    return [devices[member] for member in members]


def _device_order(text: str) -> list[int]:
    """`[4,2]T(1,0)`, an iota of that shape, transposed; or the devices themselves."""
    iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota is None:
        return [int(d) for d in re.findall(r"\d+", text)]
    shape = [int(d) for d in iota[1].split(",")]
    order = np.arange(prod(shape)).reshape(shape)
    if iota[2]:
        order = order.transpose([int(d) for d in iota[2].split(",")])
    return order.ravel().tolist()
