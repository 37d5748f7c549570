"""What a program sends between devices: how much, over which axes of the mesh, and how long.

Ring algorithms: of n devices that share an array of S bytes, each sends (n − 1)/n · S to gather or
scatter it, or to exchange parts of it, twice that to reduce it everywhere, and S to hand it on. A
group that spans d dimensions of the torus uses all their links at once, two a dimension where it
closes to a ring: 2d links of a v5e slice's full side.

Between slices there are no links. The compiler cuts what crosses them into collectives of one slice
and transfers: a chip hands its part to its host (`send`), the hosts of all slices do what the
transfer says with it over the network, and the chip gets the result back (`recv`). The rings' rules
hold for these too, each chip with its share of its host's network.
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
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


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

    def twins(self) -> list[int]:
        """The first device of each slice."""
        first = {place.slice: at for at, place in reversed(list(enumerate(self.places)))}
        return sorted(first.values())


@dataclass(frozen=True)
class Collective:
    """One collective: what each device sends, and the time at the published bandwidth.

    hidden: the compiler lets it run beside other work. network: it is between slices.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    hidden: bool
    network: bool = False


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
        if outer.opcode == "send" and _TRANSFER.search(outer.rest):
            yield outer, _transfer(outer, layout)
            continue
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
    group = first_group(part, len(layout.places) // layout.topology.slices)
    n = len(group)
    sizes = [array.bytes for array in part.arrays]
    whole = max(sizes) if part.opcode == "all-gather-start" else sum(sizes)
    if kind == "reduce-scatter":
        whole *= n
    if scattered:
        kind = "reduce-scatter"
    rounds = 2 if kind == "all-reduce" else 1
    sent = round(rounds * whole * (n - 1) / n)
    seconds = sent / (layout.links(group) * layout.topology.chip.link)
    return Collective(kind, layout.axes_of(group), sent, seconds, hidden)


def _permute(part: Instruction, layout: Layout, hidden: bool) -> Collective:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}?", part.rest)
    ends = list(map(int, re.findall(r"\d+", pairs[1]))) if pairs else [0, 0]
    size = part.arrays[0].bytes
    seconds = size / layout.topology.chip.link
    return Collective("collective-permute", layout.axes_of(ends[:2]), size, seconds, hidden)


def _transfer(send: Instruction, layout: Layout) -> Collective:
    """Of what a chip hands over; each slice's chip in the same place has its part too."""
    named = _TRANSFER.search(send.rest)
    kind = named[1].lower().replace("_", "-") if named else ""
    n, size = layout.topology.slices, send.arrays[0].bytes
    rounds = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "one-to-one": 1}
    sent = round(rounds.get(kind, (n - 1) / n) * size)
    chip = layout.topology.chip
    # Devices of one chip share its part of the network.
    seconds = chip.devices * sent / chip.network
    return Collective(kind, layout.axes_of(layout.twins()), sent, seconds, False, network=True)


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
