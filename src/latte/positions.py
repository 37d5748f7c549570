"""Loss by position in the document, also far beyond the training length: does it go on falling?"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from latte.config import MeshConfig, read_run_config
from latte.data.prepare import prepare
from latte.data.store import TokenStream
from latte.errors import UserError
from latte.mesh import make_mesh
from latte.model import LanguageModel, ModelState
from latte.run import check_store, open_run

_PIECE = 1024
"""Tokens that are read at once; the state goes on to the next ones."""


@eqx.filter_jit
def _read(
    model: LanguageModel,
    state: ModelState,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], ModelState]:
    """The loss of every target in nats, and the state after the tokens."""
    hidden, state = model.backbone(tokens, state=state)  # pyright: ignore
    logprobs = jax.nn.log_softmax(model.logits(hidden), axis=-1)
    return -jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], state


def losses(model: LanguageModel, rows: Int[np.ndarray, "B T_plus_1"]) -> Float[np.ndarray, "B T"]:
    """Nats of every token of rows after their first, in memory that does not grow with T (but by
    full attention's cache)."""
    batch, length = rows.shape[0], rows.shape[1] - 1
    size = min(_PIECE, length)
    whole = -(-length // size) * size
    padded = np.zeros((batch, whole + 1), np.int32)
    padded[:, : length + 1] = rows
    state, found = model.backbone.empty_state(batch, whole), []
    for start in range(0, whole, size):
        piece = padded[:, start : start + size + 1]
        nats, state = _read(model, state, jnp.asarray(piece[:, :-1]), jnp.asarray(piece[:, 1:]))
        found.append(np.asarray(nats))
    return np.concatenate(found, axis=1)[:, :length]


def documents(
    stream: TokenStream, length: int, batch: int
) -> Iterator[tuple[Int[np.ndarray, "B T_plus_1"], Int[np.ndarray, " B"]]]:
    """Documents cut to `length` tokens, separator in front, in batches of like lengths; and how
    many tokens of each row are real."""
    sizes = np.minimum(np.diff(stream.offsets), length + 1)
    order = np.argsort(-sizes, kind="stable")
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        rows = np.zeros((batch, int(sizes[some].max())), np.int32)
        for row, document in zip(rows, some, strict=False):
            begin = np.asarray([stream.offsets[document]])
            row[: sizes[document]] = stream.read(begin, int(sizes[document]))[0]
        kept = np.zeros(batch, int)
        kept[: len(some)] = sizes[some] - 1
        if rows.shape[1] > 1:
            yield rows, kept


def by_position(
    model: LanguageModel,
    streams: Sequence[TokenStream],
    length: int,
    *,
    batch: int = 8,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """Mean loss of tokens at positions 1 to 15, 16 to 31, 32 to 63 and so on up to `length`."""
    edges = [1, *(2**n for n in range(4, 64) if 2**n < length), length + 1]
    nats, counts = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    for rows, kept in chain.from_iterable(documents(s, length, batch) for s in streams):
        found = losses(model, rows)
        for row, count in zip(found, kept.tolist(), strict=True):
            bins = np.searchsorted(edges, np.arange(1, count + 1), side="right") - 1
            nats += np.bincount(bins, row[:count], len(nats))
            counts += np.bincount(bins, minlength=len(nats))
        advance(int(counts.sum()))
    return [
        {
            "from": first,
            "to": after - 1,
            "tokens": int(count),
            "loss": total / count,
            "perplexity": math.exp(min(total / count, 700)),
        }
        for first, after, total, count in zip(edges, edges[1:], nats, counts, strict=False)
        if count
    ]


def positions_of_run(run_dir: Path, length: int, *, batch: int = 8) -> dict[str, Any]:
    """`by_position` of a run's newest checkpoint on its held-out documents.

    Raises:
        UserError: there is no such run, its corpus is not what it was, or the model has fewer
            learned positions.
    """
    store = prepare(read_run_config(run_dir).data)
    check_store(run_dir, store)
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        config, _, model, step = open_run(run_dir)
    if config.model.position == "learned" and length > config.model.max_length:
        raise UserError(
            f"--by-position is {length}, but the model has {config.model.max_length} learned "
            f"positions; take --by-position {config.model.max_length} or less"
        )
    positions = by_position(model, store.split("heldout"), length, batch=batch)
    return {"step": step, "positions": positions}
