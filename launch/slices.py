"""TPU slices: what Google Cloud calls them, and what they are."""

import re
from typing import NamedTuple

from gcloud import LaunchError

NAME = re.compile(r"\b(v4|v5litepod|v5p|v6e)-(\d+)\b")
"""An accelerator type in a text, such as v5litepod-256."""


class _Family(NamedTuple):
    """One generation: the number in its accelerator types counts cores, `cores` a chip."""

    jax: str
    cores: int
    dimensions: int
    most_chips: int
    runtime: str


_FAMILIES = {
    "v4": _Family("v4", 2, 3, 4096, "tpu-ubuntu2204-base"),
    "v5litepod": _Family("v5e", 1, 2, 256, "v2-alpha-tpuv5-lite"),
    "v5p": _Family("v5p", 2, 3, 4096, "v2-alpha-tpuv5"),
    "v6e": _Family("v6e", 1, 2, 256, "v2-alpha-tpuv6e"),
}


def runtime_version(accelerator: str) -> str:
    """The image that Google recommends for the hosts of a slice."""
    return _FAMILIES[accelerator.partition("-")[0]].runtime


def topology(accelerator: str) -> str:
    """The shape of a slice as JAX names it: v5e:16x16 for v5litepod-256.

    Raises:
        LaunchError: there is no such slice.
    """
    match = NAME.fullmatch(accelerator)
    if match:
        family, number = _FAMILIES[match[1]], int(match[2])
        if number in _sizes(family):
            return f"{family.jax}:{_shape(number // family.cores, family.dimensions)}"
        sizes = ", ".join(map(str, _sizes(family)))
        raise LaunchError(
            f"there is no slice {accelerator}; the sizes of {match[1]} are {sizes}", 2
        )
    raise LaunchError(
        f"--tpu is {accelerator!r}, which is no slice of {', '.join(_FAMILIES)}; "
        "write one as v5litepod-256",
        2,
    )


def _sizes(family: _Family) -> list[int]:
    powers = [2**i for i in range(family.most_chips.bit_length())]
    least = 4 if family.dimensions == 3 else 1
    return [family.cores * chips for chips in powers if chips >= least and chips != 2]


def _shape(chips: int, dimensions: int) -> str:
    """The sides, powers of two as even as they can be, the longest last; 2x2x1 is one host."""
    low, high = divmod(chips.bit_length() - 1, dimensions)
    sides = [2 ** (low + (i >= dimensions - high)) for i in range(dimensions)]
    return "x".join(map(str, sides if sides != [1, 2, 2] else [2, 2, 1]))
