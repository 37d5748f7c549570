"""What a Latte model carries from one call to the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LatteCache:
    """The states of all layers; its size does not grow, but in layers of full attention.

    layers: the state of each, None before the first call.
    count [B]: real tokens that each row has seen.
    position [B]: of the next token in its document.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.count: Tensor | None = None
        self.position: Tensor | None = None
        self._columns = 0

    def begin(self, batch: int, layers: int, device: torch.device) -> None:
        """Makes the cache that of `batch` rows, where it is still empty."""
        if self.count is None:
            self.count = torch.zeros(batch, dtype=torch.long, device=device)
            self.position = torch.zeros_like(self.count)
            self.layers = [None] * layers
        elif self.count.shape[0] != batch:
            raise ValueError(
                f"the cache has {self.count.shape[0]} rows and the input {batch}; give the same "
                "batch, or a new LatteCache()"
            )

    def advance(self, columns: int, count: Tensor, position: Tensor) -> None:
        """Notes a call of so many columns."""
        self._columns, self.count, self.position = self._columns + columns, count, position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included, as the attention mask counts them."""
        return self._columns

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        def of(state: Any) -> Any:
            if state is None or isinstance(state, Tensor):
                return None if state is None else change(state)
            parts = map(of, state)
            return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)

        self.layers = [of(state) for state in self.layers]
        self.count, self.position = of(self.count), of(self.position)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts rows in the order that beam search chose."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes so many copies of every row, each behind its own."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        """Forgets everything."""
        self.layers, self.count, self.position, self._columns = [], None, None, 0

    def crop(self, max_length: int) -> None:
        """A recurrent state cannot go back."""
        raise ValueError("a Latte model's state cannot be cut to an earlier token; read it again")
