"""The order of training rows: (seed, step) → batch.

The stream is a ring: after its last token comes its first one, a separator. Each epoch cuts the
ring at another place into as many rows of T tokens as fit (fewer than T tokens are left over) and
takes them in another order. Both follow from the seed and the epoch alone, so a run's position is
its step.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import grain
import grain.experimental
import numpy as np
from jaxtyping import Int

from latte.data.batch import Batch, cut_batch
from latte.data.store import TokenStore
from latte.errors import UserError

_THREADS = 2
_PREFETCH = 8
"""Batches that are ready before they are asked for."""
_ROUNDS = 4
"""Rounds of the cipher that permutes rows."""
_LAST_STEP = 1 << 62


@dataclass(frozen=True)
class Loader:
    """Batches of rows of one split of a store.

    rows: which rows of every batch are read, in order; None for all of them.

    Raises:
      UserError: the split has fewer tokens than a row.
    """

    store: TokenStore
    split: Literal["train", "heldout"]
    seed: int
    batch_size: int
    sequence_length: int
    rows: Int[np.ndarray, " R"] | None = None

    def __post_init__(self):
        tokens = len(self.store.stream(self.split))
        if tokens < self.sequence_length:
            raise UserError(
                f"the {self.split} split of {self.store.folder} has {tokens} tokens, fewer than a "
                f"row of {self.sequence_length}: lower --train.sequence_length or give more text"
            )

    @property
    def rows_per_epoch(self) -> int:
        """Rows that the split is cut into."""
        return len(self.store.stream(self.split)) // self.sequence_length

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, counted from 0. A batch may lie in two epochs."""
        stream = self.store.stream(self.split)
        rows = range(self.batch_size) if self.rows is None else self.rows.tolist()
        starts = np.asarray([self._start(step * self.batch_size + row) for row in rows])
        return cut_batch(
            stream.read(starts, self.sequence_length + 1), self.store.tokenizer.separator
        )

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """The batches of `start_step` and all steps after it, read ahead by threads."""
        steps = grain.MapDataset.range(start_step, _LAST_STEP)
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCH)
        return iter(steps.map(self.batch_at).to_iter_dataset(options))

    def _start(self, row: int) -> int:
        """Where a row begins in the stream; rows are counted from the start of the run."""
        rows = self.rows_per_epoch
        epoch, index = divmod(row, rows)
        cut, key = _draw(self.seed, epoch)
        shuffled = grain.experimental.index_shuffle(index, rows - 1, key, _ROUNDS)
        tokens = len(self.store.stream(self.split))
        return (cut * tokens // (1 << 32) + shuffled * self.sequence_length) % tokens


@functools.lru_cache(maxsize=8)
def _draw(seed: int, epoch: int) -> tuple[int, int]:
    """Two random numbers of 32 bits: where an epoch cuts the ring, and the key of its order."""
    cut, key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint32).tolist()
    return cut, key
