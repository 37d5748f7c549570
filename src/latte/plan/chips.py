"""TPU chips as their vendor publishes them, and slices of them by name.

Sources: Google Cloud's page of each version (cloud.google.com/tpu/docs/v5e and so on) for memory,
bandwidths and links; clocks are those that the peaks follow from. An ICI bandwidth there is of all
links of a chip in both directions; here it is of one link in one direction. `reserved` is what the
compiler keeps from a program: the memory that it names when a program does not fit is that much
less than the chip's.
"""

import re
from dataclasses import dataclass
from math import prod

from latte.errors import UserError
from latte.speed import PEAK_FLOPS

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip.

    devices: of JAX a chip, where a program is compiled with no TPU.
    cores: a chip; those that share a device work as one. clock: hertz.
    flops: peak dense bfloat16 FLOP/s.
    memory, reserved: bytes of HBM, and those of them that no program gets.
    bandwidth: of the HBM, bytes/s.
    dimensions: of the torus. link: bytes/s of one link in one direction; a dimension has two.
    network: bytes/s of a chip's share of its host's network cards, in one direction.
    """

    devices: int
    cores: int
    clock: float
    flops: float
    memory: int
    reserved: int
    bandwidth: float
    dimensions: int
    link: float
    network: float


_V4, _V5E, _V5P = PEAK_FLOPS["TPU v4"], PEAK_FLOPS["TPU v5e"], PEAK_FLOPS["TPU v5p"]
_V6E, _7X = PEAK_FLOPS["TPU v6e"], 2 * PEAK_FLOPS["TPU7x"]
CHIPS = {
    "v4": Chip(2, 2, 1.05e9, _V4, 32 * GIB, GIB // 4, 1.228e12, 3, 50e9, 6.25e9),
    "v5e": Chip(1, 1, 1.5e9, _V5E, 16 * GIB, GIB // 4, 0.819e12, 2, 50e9, 3.125e9),
    "v5p": Chip(1, 2, 1.75e9, _V5P, 95 * GIB, GIB // 4, 2.765e12, 3, 100e9, 6.25e9),
    "v6e": Chip(1, 1, 1.75e9, _V6E, 32 * GIB, GIB // 4, 1.64e12, 2, 100e9, 12.5e9),
    "tpu7x": Chip(2, 2, 1.9e9, _7X, 192 * GIB, GIB // 4, 7.38e12, 3, 100e9, 12.5e9),
}


@dataclass(frozen=True)
class Topology:
    """One or several equal slices; `name` is as libtpu takes it, of one."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        return prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices


def parse_topology(name: str, slices: int = 1) -> Topology:
    """The slice called CHIP:AxB or CHIP:AxBxC.

    Raises:
        UserError: there is no such chip, or its slices have no such shape.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        known = ", ".join(CHIPS)
        raise UserError(
            f"there is no TPU {kind!r} in --topology {name}; there are {known}, and a slice is "
            "written with its shape, as v5e:16x16 or v5p:4x4x4"
        )
    chip = CHIPS[kind]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") + 1 != chip.dimensions:
        example = "16x16" if chip.dimensions == 2 else "4x4x8"
        raise UserError(
            f"--topology {name} is no slice: {kind} has {chip.dimensions} dimensions, as in "
            f"{kind}:{example}"
        )
    if slices < 1:
        raise UserError(f"--slices is {slices}, but it must be at least 1")
    return Topology(name, chip, tuple(map(int, shape.split("x"))), slices)
