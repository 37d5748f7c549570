"""Held-out documents, read once and in order."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from latte.data.batch import Batch, number_documents
from latte.data.store import TokenStore
from latte.errors import UserError


@dataclass(frozen=True)
class HeldoutRows:
    """The first held-out documents as batches; iterating again reads them again.

    The weights of all batches sum to `targets`. Nats summed over these targets, divided by
    ln(2) · bytes, are bits per byte: the end of each document is paid for, padding is not.

    targets: tokens that are predicted.
    bytes: bytes of text that they stand for, exactly.
    """

    store: TokenStore
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
        separator = self.store.tokenizer.separator
        stream = self.store.heldout.read(np.asarray([first]), length + 1)[0]
        tokens, targets = np.full((2, *shape), separator, np.int32)
        tokens.flat[:length] = stream[:-1]
        targets.flat[:length] = stream[1:]
        weights = np.zeros(shape, np.float32)
        weights.flat[:length] = 1
        return Batch(tokens, targets, number_documents(tokens, separator), weights)


def heldout_rows(
    store: TokenStore, sequence_length: int, batch_size: int, limit_tokens: int | None = None
) -> HeldoutRows:
    """Held-out rows of at most about `limit_tokens` tokens; None reads all.

    Whole documents are read up to the limit. If the first one is longer than that, its beginning is
    read: `limit_tokens` tokens, and their bytes are counted.

    Args:
      limit_tokens: at least 1.

    Raises:
      UserError: nothing is held out.
    """
    stream = store.heldout
    if len(stream.sizes) == 0:
        raise UserError(
            f"{store.folder} holds no documents out: raise --data.heldout or give more text"
        )
    whole = len(stream.sizes)
    if limit_tokens is not None:
        whole = int(np.searchsorted(stream.offsets, limit_tokens, side="right")) - 1
    if whole > 0:
        # The last document's end is predicted too: the ring has a separator there.
        targets, size = int(stream.offsets[whole]), int(stream.sizes[:whole].sum())
    else:
        assert limit_tokens is not None
        targets = limit_tokens
        ids = stream.read(np.asarray([1]), targets)[0]
        size = len(store.tokenizer.decode_bytes(ids))
    return HeldoutRows(store, sequence_length, batch_size, targets, size)
