"""Best-fit packing: documents kept whole in rows of T tokens, inside fixed windows of documents.

A document longer than a row gives as many full rows as it fills; what is left of it, and every
shorter document, is one piece. Longest pieces first, each goes to the row with the least room that
it fits into (best-fit decreasing). A window is packed by itself, so that a row of a corpus is
known from the documents of its window alone.
"""

import bisect
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

WINDOW = 512
"""Documents of a window; the last one of a range has fewer."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Row lengths whose rows are counted when a store is prepared."""


class Packing(NamedTuple):
    """The rows of a window, as pieces sorted by row.

    row, document: of each piece, counted in the window.
    start: of each piece in its document.
    length: of each piece.
    """

    row: Int64[np.ndarray, " pieces"]
    document: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    length: Int64[np.ndarray, " pieces"]


def pack(lengths: Integer[np.ndarray, " n"], T: int) -> Packing:
    """Packs the documents of a window, of `lengths` ≥ 1 tokens each, into rows of T tokens."""
    full, left = np.divmod(lengths.astype(np.int64), T)
    document = np.repeat(np.arange(len(full)), full)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(full) - full, full)
    pieces = np.flatnonzero(left)
    # Equal lengths stay in their order: the packing follows from the lengths alone.
    pieces = pieces[np.argsort(-left[pieces], kind="stable")]
    row = np.concatenate([np.arange(len(document)), len(document) + _fit(left[pieces], T)])
    order = np.argsort(row, kind="stable")
    return Packing(
        row[order],
        np.concatenate([document, pieces])[order],
        np.concatenate([nth * T, full[pieces] * T])[order],
        np.concatenate([np.full(len(document), T), left[pieces]])[order],
    )


def count_rows(lengths: Integer[np.ndarray, " n"], T: int) -> int:
    """How many rows `pack` makes."""
    full, left = np.divmod(lengths.astype(np.int64), T)
    left = np.sort(left[left > 0])[::-1]
    return int(full.sum()) + (int(_fit(left, T).max()) + 1 if len(left) else 0)


def _fit(lengths: Int64[np.ndarray, " n"], T: int) -> Int64[np.ndarray, " n"]:
    """The row of each piece, taken in the order given: the fullest that has room, or a new one."""
    room: list[int] = []  # what is left in each open row, ascending, and which row that is
    which: list[int] = []
    rows, count = np.empty(len(lengths), np.int64), 0
    for i, length in enumerate(lengths.tolist()):
        at = bisect.bisect_left(room, length)
        if at < len(room):
            rest, row = room.pop(at) - length, which.pop(at)
        else:
            rest, row = T - length, count
            count += 1
        rows[i] = row
        if rest:
            at = bisect.bisect_left(room, rest)
            room.insert(at, rest)
            which.insert(at, row)
    return rows
