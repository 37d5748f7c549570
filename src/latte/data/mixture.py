"""Which subset each row of a run is from: a pure function of the row's number.

The rows of a run are dealt out by weight, and not drawn by chance: the heaviest subset takes its
share of all rows, evenly spaced, the next one its share of what that leaves, and so on. Of n rows
in a row a share α of all takes the integers between two values of n·α + ½: so many that the count
never strays from n·α by one, and how many it took before any row is a product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ONE = 1 << 40
"""A share of 1: shares are integers, so that every machine deals alike."""


class Place(NamedTuple):
    """Where a row is from: a subset, by its number, and how many rows of it came before."""

    subset: int
    nth: int


class Share(NamedTuple):
    """A subset's share, out of `_ONE`, of the rows that those before it leave."""

    subset: int
    share: int


@dataclass(frozen=True)
class Stage:
    """The weights from a row of the run on.

    first: that row. before: rows of each subset that came before it.
    """

    first: int
    before: tuple[int, ...]
    shares: tuple[Share, ...]

    def locate(self, row: int) -> Place:
        """Where a row is from."""
        left = row - self.first
        for subset, share in self.shares:
            taken = _taken(left, share)
            if _taken(left + 1, share) > taken:
                return Place(subset, self.before[subset] + taken)
            left -= taken
        raise AssertionError("the last share is of all that is left")

    def counts(self, row: int) -> tuple[int, ...]:
        """Rows of each subset before a row."""
        counts, left = list(self.before), row - self.first
        for subset, share in self.shares:
            taken = _taken(left, share)
            counts[subset] += taken
            left -= taken
        return tuple(counts)


def _taken(rows: int, share: int) -> int:
    return (rows * share + _ONE // 2) // _ONE


@dataclass(frozen=True)
class Mixture:
    """The stages of a run; the first one begins with row 0."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(
        cls, subsets: Sequence[str], stages: Sequence[tuple[int, Mapping[str, float]]]
    ) -> "Mixture":
        """The mixture of weights by subset, each from a row of the run on."""
        made: list[Stage] = []
        for first, weights in stages:
            before = made[-1].counts(first) if made else (0,) * len(subsets)
            made.append(Stage(first, before, _shares(subsets, weights)))
        return cls(tuple(made))

    def locate(self, row: int) -> Place:
        """Where a row is from."""
        return next(s for s in reversed(self.stages) if s.first <= row).locate(row)

    def counts(self, row: int) -> tuple[int, ...]:
        """Rows of each subset before a row."""
        return next(s for s in reversed(self.stages) if s.first <= row).counts(row)


def _shares(subsets: Sequence[str], weights: Mapping[str, float]) -> tuple[Share, ...]:
    """Shares of what is left, the heaviest first; subsets without weight have none."""
    pairs = ((weights.get(name, 0.0), i) for i, name in enumerate(subsets))
    heavy = sorted((pair for pair in pairs if pair[0] > 0), key=lambda pair: (-pair[0], pair[1]))
    shares = []
    for at, (weight, i) in enumerate(heavy):
        left = sum(w for w, _ in heavy[at:])
        shares.append(Share(i, _ONE if at == len(heavy) - 1 else round(weight / left * _ONE)))
    return tuple(shares)
