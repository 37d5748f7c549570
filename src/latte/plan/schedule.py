"""What libtpu's compiler dumps of a kernel: its schedule of VLIW bundles, counted.

A kernel's issue time is its bundles, each weighted by the trips of the loops around it, over the
clock: waits for memory are not in it, and both sides of a branch are, so it is an upper bound of
the time to issue. It is of one core.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def dump_flags(folder: Path) -> str:
    """LIBTPU_INIT_ARGS that have every schedule written to a folder; libtpu reads them once."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
    )


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


class Schedules:
    """The schedules that were dumped to a folder, by the name of an instruction."""

    def __init__(self, folder: Path):
        self._paths: dict[str, Path] = {}
        for path in sorted(folder.glob("*-final_bundles.txt")):
            named = re.fullmatch(r"\d+-(.*)-\d+-final_bundles.txt", path.name)
            if named:
                self._paths[named[1]] = path

    def __call__(self, name: str) -> Issue | None:
        """Of an instruction; None where it has none of its own, as scalars have."""
        return count_bundles(self._paths[name].read_text()) if name in self._paths else None
