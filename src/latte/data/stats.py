"""Figures of a store: how much of what, and how long its documents are."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from latte.data.store import TokenStore, TokenStream

_SAMPLE = 100_000
"""Most documents of a subset whose lengths are looked at."""
_BLOCK = 1000
"""Documents that follow each other in a sample."""


class SubsetStats(NamedTuple):
    """Figures of a subset of a split.

    lengths: of documents in tokens, the separator included: 10th, 50th and 90th of 100, longest;
        of a sample where there are many.
    """

    split: str
    subset: str
    tokens: int
    documents: int
    bytes: int
    bytes_per_token: float
    lengths: tuple[int, int, int, int]


def store_stats(store: TokenStore) -> list[SubsetStats]:
    """The figures of each subset of each split."""
    found = []
    for (split, subset), stream in store.streams.items():
        count = store.manifest.subsets[split][subset]
        lengths = sample_lengths(stream)
        ranks = np.quantile(lengths, (0.1, 0.5, 0.9, 1)).astype(int).tolist()
        # Separators stand for no text.
        per_token = count.bytes / max(1, count.tokens - count.documents)
        sizes = count.tokens, count.documents, count.bytes
        found.append(SubsetStats(split, subset, *sizes, per_token, tuple(ranks)))
    return found


def sample_lengths(stream: TokenStream) -> Int64[np.ndarray, " n"]:
    """The lengths of documents from all over a subset, in tokens."""
    total = int(stream.index.documents.sum())
    stride = max(1, total // _SAMPLE)
    lengths = []
    before = 0  # documents of the ranges before this one
    for i, documents in enumerate(stream.index.documents.tolist()):
        # Of every `stride` blocks of documents the first one.
        period = stride * _BLOCK
        for at in range(-before % period, documents, period):
            rows = stream.documents_of(i, max(at - 1, 0), min(at + _BLOCK, documents))
            start = [stream.index.start[i]] if at == 0 else []
            lengths.append(np.diff(np.concatenate([start, rows[:, 0]]).astype(np.int64)))
        before += documents
    return np.concatenate(lengths)
