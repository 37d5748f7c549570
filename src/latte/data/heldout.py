"""Held-out documents, read once and in order."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from latte.data.batch import Batch, number_documents
from latte.data.store import TokenStore, TokenStream
from latte.errors import UserError


@dataclass(frozen=True)
class HeldoutRows:
    """The first held-out documents of a subset as batches; iterating again reads them again.

    The weights of all batches sum to `targets`. Nats summed over these targets, divided by
    ln(2) · bytes, are bits per byte: the end of each document is paid for, padding is not.

    targets: tokens that are predicted.
    bytes: bytes of text that they stand for, exactly.
    """

    stream: TokenStream
    separator: int
    sequence_length: int
    batch_size: int
    targets: int
    bytes: int

    def __iter__(self) -> Iterator[Batch]:
        """Batches of consecutive rows; the last one is padded.

        Padding is separators of weight 0, in segments of their own: nothing measured sees it.
        """
        span = self.sequence_length * self.batch_size
        for first in range(0, self.targets, span):
            yield self._batch(first, min(span, self.targets - first))

    def _batch(self, first: int, length: int) -> Batch:
        """The batch that predicts targets `first` to `first + length`."""
        shape = self.batch_size, self.sequence_length
        stream = self.stream.read(np.asarray([first]), length + 1)[0]
        tokens, targets = np.full((2, *shape), self.separator, np.int32)
        tokens.flat[:length] = stream[:-1]
        targets.flat[:length] = stream[1:]
        weights = np.zeros(shape, np.float32)
        weights.flat[:length] = 1
        return Batch(tokens, targets, number_documents(tokens, self.separator), weights)


def heldout_rows(
    store: TokenStore, sequence_length: int, batch_size: int, limit_tokens: int | None = None
) -> list[HeldoutRows]:
    """Held-out rows of each subset, of at most about `limit_tokens` tokens in all; None reads all.

    Of every subset whole documents are read up to its part of the limit. If the first one is longer
    than that, its beginning is read: so many tokens, and their bytes are counted.

    Args:
      limit_tokens: at least 1.

    Raises:
      UserError: nothing is held out.
    """
    streams = store.split("heldout")
    if not streams:
        raise UserError(
            f"{store.place} holds no documents out: raise --data.heldout or give more text"
        )
    limit = None if limit_tokens is None else max(1, limit_tokens // len(streams))
    return [_rows(store, stream, sequence_length, batch_size, limit) for stream in streams]


def _rows(
    store: TokenStore, stream: TokenStream, T: int, batch_size: int, limit: int | None
) -> HeldoutRows:
    offsets, sizes = stream.offsets, stream.sizes
    whole = len(sizes)
    if limit is not None:
        whole = int(np.searchsorted(offsets, limit, side="right")) - 1
    if whole > 0:
        # The last document's end is predicted too: the ring has a separator there.
        targets, size = int(offsets[whole]), int(sizes[:whole].sum())
    else:
        assert limit is not None
        targets = limit
        ids = stream.read(np.asarray([1]), targets)[0]
        size = len(store.tokenizer.decode_bytes(ids))
    return HeldoutRows(stream, store.tokenizer.separator, T, batch_size, targets, size)
