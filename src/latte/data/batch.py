"""What a training step reads."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


class Batch(NamedTuple):
    """Rows cut from a stream of documents, each of which begins with the separator.

    tokens: token ids.
    targets: the token that follows each one; after a document's last token this is the separator.
    segment_ids: ≥ 0, counts the documents of a row.
    weights: 1, or 0 where nothing is to be predicted.
    """

    tokens: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    weights: Float32[np.ndarray, "B T"]


def cut_batch(rows: Int32[np.ndarray, "B T_plus_1"], separator: int) -> Batch:
    """Makes full rows into a batch; a row's last token is a target only."""
    tokens = np.ascontiguousarray(rows[:, :-1])
    return Batch(
        tokens,
        np.ascontiguousarray(rows[:, 1:]),
        number_documents(tokens, separator),
        np.ones(tokens.shape, np.float32),
    )


def number_documents(tokens: Int32[np.ndarray, "B T"], separator: int) -> Int32[np.ndarray, "B T"]:
    """Segment ids of rows; a separator stands at every document's start and nowhere else."""
    return np.cumsum(tokens == separator, axis=1, dtype=np.int32)
