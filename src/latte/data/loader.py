"""The order of training rows: (seed, step) → batch. A run's position is its step.

The mixture says which subset a row is from, and how many rows of that came before; with that, the
order of the subset's epoch says which of its rows it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import grain
import numpy as np
from jaxtyping import Int

from latte.config import DataConfig, nearest
from latte.data.batch import Batch
from latte.data.manifest import Count
from latte.data.mixture import Mixture, Place
from latte.data.rows import CutRows, FitRows, Rows
from latte.data.store import TokenStore, TokenStream
from latte.errors import UserError
from latte.values import parse_mixture

_THREADS = 2
_PREFETCH = 8
"""Batches that are ready before they are asked for."""
_LAST_STEP = 1 << 62


@dataclass(frozen=True)
class Loader:
    """Batches of rows of one split of a store.

    rows: which rows of every batch are read, in order; None for all of them.
    data: its mixture and packing are followed.

    Raises:
      UserError: the split has fewer tokens than a row, or the mixture names what it has not.
    """

    store: TokenStore
    split: Literal["train", "heldout"]
    seed: int
    batch_size: int
    sequence_length: int
    rows: Int[np.ndarray, " R"] | None = None
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self):
        # What is wrong is said now, and not in a thread.
        _ = self.packed, self.mixture

    @cached_property
    def streams(self) -> list[TokenStream]:
        """The subsets, sorted by name; those that are too small for a row are left out."""
        streams = self.store.split(self.split)
        kept = [stream for stream in streams if len(stream) >= self.sequence_length]
        if not kept:
            tokens = max(map(len, streams), default=0)
            raise UserError(
                f"the {self.split} split of {self.store.place} has {tokens} tokens, fewer than a "
                f"row of {self.sequence_length}: lower --train.sequence_length or give more text"
            )
        return kept

    @cached_property
    def packed(self) -> Rows:
        """The rows of the subsets."""
        kind = {"cut": CutRows, "fit": FitRows}[self.data.packing]
        return kind(self.store, self.streams, self.sequence_length, self.seed)

    @cached_property
    def mixture(self) -> Mixture:
        """How the rows of a run are dealt out to the subsets."""
        names = [stream.subset for stream in self.streams]
        stages = parse_mixture(self.data.mixture) or [(0, self._default(names))]
        return Mixture.of(
            names,
            [(step * self.batch_size, self._by_tokens(names, some)) for step, some in stages],
        )

    def place(self, step: int, row: int) -> Place:
        """Where a row of a step is from."""
        return self.mixture.locate(step * self.batch_size + row)

    def batch_at(self, step: int) -> Batch:
        """The batch of a step, counted from 0. A batch may lie in two epochs."""
        rows = range(self.batch_size) if self.rows is None else self.rows.tolist()
        return self.packed.read([self.place(step, row) for row in rows])

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """The batches of `start_step` and all steps after it, read ahead by threads."""
        steps = grain.MapDataset.range(start_step, _LAST_STEP)
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCH)
        return iter(steps.map(self.batch_at).to_iter_dataset(options))

    def epochs(self, step: int) -> dict[str, float]:
        """How often each subset was read before a step."""
        counts = self.mixture.counts(step * self.batch_size)
        rows = zip(self.streams, counts, self.packed.per_epoch, strict=True)
        return {stream.subset: count / whole for stream, count, whole in rows}

    def _default(self, names: list[str]) -> dict[str, float]:
        """The published proportions of those subsets that are there, or all by their size."""
        published = self.store.manifest.weights
        if all(name in published for name in names):
            return {name: published[name] for name in names}
        rows = zip(names, self.packed.per_epoch, strict=True)
        return {name: float(count) for name, count in rows}

    def _by_tokens(self, names: list[str], weights: Mapping[str, float]) -> dict[str, float]:
        """Weights by tokens, that is by rows."""
        counts = self.store.manifest.subsets[self.split]
        for name, weight in weights.items():
            if name not in counts:
                near = nearest(name, counts) or f"; there are {', '.join(counts)}"
                raise UserError(
                    f"data.mixture names {name!r}, which {self.store.place} has not{near}"
                )
            if weight and name not in names:
                raise UserError(
                    f"subset {name!r} of {self.store.place} has {counts[name].tokens} tokens, "
                    f"fewer than a row of {self.sequence_length}: give it no weight in "
                    "--data.mixture, or lower --train.sequence_length"
                )
        if self.data.mixture_by == "tokens" or not self.data.mixture:
            return dict(weights)
        return {name: weight * _mean(counts[name]) for name, weight in weights.items()}


def _mean(count: Count) -> float:
    """Tokens of a document."""
    return count.tokens / count.documents
