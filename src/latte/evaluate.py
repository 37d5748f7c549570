"""Loss on held-out documents, and how the latents are used."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from latte.config import MeshConfig, read_run_config
from latte.data.batch import Batch
from latte.data.heldout import HeldoutRows, heldout_rows
from latte.data.prepare import prepare
from latte.mesh import make_mesh, put_rows
from latte.model import LanguageModel
from latte.run import check_store, open_run


@jax.jit
def _sums(model: LanguageModel, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
    sums = model.loss(*map(jnp.asarray, batch))
    return sums.nll, jnp.sum(batch.weights)


def evaluate(
    model: LanguageModel,
    subsets: Sequence[HeldoutRows],
    *,
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, float]:
    """Mean loss of the held-out targets (nats a token), perplexity, and bits per byte of text.

    The end of each document is a target too, so bits per byte pays for it. Where there are several
    subsets, these are of all targets together, and `heldout_loss/SUBSET` and so on are of each.
    """
    sums: list[tuple[float, int, int]] = []
    for rows in subsets:
        nats, targets = 0.0, 0.0
        for batch in rows:
            nll, weight = _sums(model, put_rows(batch, rows.batch_size))
            nats, targets = nats + float(nll), targets + float(weight)
            advance(int(targets) + sum(tokens for _, tokens, _ in sums))
        sums.append((nats, int(targets), rows.bytes))
    values = _measures("", *map(sum, zip(*sums, strict=True)))
    if len(subsets) > 1:
        for rows, some in zip(subsets, sums, strict=True):
            values |= _measures(f"/{rows.stream.subset}", *some)
    return values


def _measures(of: str, nats: float, tokens: int, size: int) -> dict[str, float]:
    """What is reported of a sum of nats over targets that stand for `size` bytes."""
    loss = nats / tokens
    return {
        f"heldout_loss{of}": loss,
        f"heldout_perplexity{of}": math.exp(min(loss, 700)),
        f"heldout_bits_per_byte{of}": nats / math.log(2) / size,
        f"heldout_tokens{of}": tokens,
        f"heldout_bytes{of}": size,
    }


class LatentUse(NamedTuple):
    """How one layer uses its states: entropy of p(l|t) over its states as a share of the largest
    possible, and the mean mass of the window's state (None without a window)."""

    entropy: float
    window_mass: float | None


@jax.jit
def latents(
    model: LanguageModel, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> list[Float[Array, "B T H L"] | None]:
    """p(l|t) of every layer of a model for packed rows; None for layers without latents."""
    return model.backbone.latents(tokens, segment_ids)


def latent_use(p: Float[np.ndarray, "B T H L"], has_window: bool) -> LatentUse:
    """Means over tokens and heads of one layer. Near-zero entropy is latent collapse."""
    states = p.shape[-1]
    nats = -np.sum(p * np.log(np.maximum(p, 1e-30)), axis=-1).mean()
    entropy = float(nats) / math.log(states) if states > 1 else 0.0
    return LatentUse(entropy, float(p[..., 0].mean()) if has_window else None)


def first_rows(subsets: Sequence[HeldoutRows], count: int) -> Batch:
    """The first rows of an evaluation, to look at the latents of."""
    return Batch(*(array[:count] for array in next(iter(subsets[0]))))


def evaluate_run(run_dir: Path) -> dict[str, Any]:
    """Evaluates a run's newest checkpoint on all of its held-out documents, on all devices.

    Raises:
        UserError: there is no such run, or its corpus is not what it was.
    """
    store = prepare(read_run_config(run_dir).data)
    check_store(run_dir, store)
    with jax.set_mesh(make_mesh(MeshConfig())):
        config, _, model, step = open_run(run_dir)
        rows = heldout_rows(store, config.train.sequence_length, config.train.batch_size)
        return {"step": step, **evaluate(model, rows)}
