"""What a run shows of itself after an evaluation: figures, plots and a sample."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from latte import plots
from latte.config import Config
from latte.data.batch import Batch
from latte.data.heldout import heldout_rows
from latte.data.store import TokenStore
from latte.evaluate import evaluate, first_rows, latent_use, latents
from latte.generate import Sampling, continuations, generate
from latte.metrics import Metrics, NoMetrics
from latte.model import LanguageModel
from latte.processes import is_first

_ROWS = 4
"""Held-out rows whose latents are looked at."""
_TOKENS_SHOWN = 25
"""Tokens in the picture of the latents, as in the paper's Figure 7."""


def report_heldout(
    config: Config,
    run_dir: Path,
    store: TokenStore,
    metrics: Metrics | NoMetrics,
    model: LanguageModel,
    step: int,
) -> float:
    """Evaluates the model after `step`, writes its figures, plots and sample into the run, and
    returns the held-out loss.

    All processes compute; the first one writes.
    The record in metrics.jsonl comes last, before the curve that is drawn from it: a run that was
    killed before evaluates again when it goes on.
    """
    train = config.train
    limit = None if step == train.steps else train.eval_tokens
    rows = heldout_rows(store, train.sequence_length, train.batch_size, limit)
    values = evaluate(model, rows)
    entropies, masses = _report_latents(config, run_dir, store, model, first_rows(rows, _ROWS))
    sample = _write_sample(config, run_dir, store, model, step) if train.sample_tokens else ""
    metrics.log_eval(
        step,
        {**values, "latent_entropy": entropies, "window_mass": masses} if entropies else values,
    )
    metrics.sync()
    metrics.say(
        f"step {step}: held out {values['heldout_loss']:.4f} nats a token, "
        f"perplexity {values['heldout_perplexity']:.2f}, "
        f"{values['heldout_bits_per_byte']:.4f} bits per byte"
    )
    if not is_first():
        return values["heldout_loss"]
    plots.loss_curve(run_dir / "metrics.jsonl", run_dir / "plots" / "loss.png", title=config.name)
    if sample and step == train.steps:
        metrics.say(f"sample after step {step}:\n{sample}")
    return values["heldout_loss"]


def _has_window(config: Config, layer: int) -> bool:
    return config.model.pattern[layer % len(config.model.pattern)].endswith("swa")


def _report_latents(
    config: Config, run_dir: Path, store: TokenStore, model: LanguageModel, rows: Batch
) -> tuple[list[float], list[float]]:
    """Entropy and window mass of each layer that has latents, and their pictures."""
    seen = latents(model, rows.tokens, rows.segment_ids)
    layers = [(i, np.asarray(p)) for i, p in enumerate(seen) if p is not None]
    if not layers:
        return [], []
    uses = [latent_use(p, _has_window(config, i)) for i, p in layers]
    entropies = [use.entropy for use in uses]
    masses = [math.nan if use.window_mass is None else use.window_mass for use in uses]
    windows = not all(math.isnan(mass) for mass in masses)
    if not is_first():
        return entropies, masses if windows else []
    folder = run_dir / "plots"
    plots.latent_entropy(entropies, masses if windows else None, folder / "latent_entropy.png")
    _draw_usage(config, store, layers, rows, folder / "latents.png")
    return entropies, masses if windows else []


def _draw_usage(
    config: Config,
    store: TokenStore,
    layers: Sequence[tuple[int, np.ndarray]],
    rows: Batch,
    out: Path,
) -> None:
    """p(l|t) over the first tokens of a row, of the layers that are like the first."""
    first, shape = layers[0][0], layers[0][1].shape
    alike = [
        p[0, :_TOKENS_SHOWN].swapaxes(0, 1)
        for i, p in layers
        if p.shape == shape and _has_window(config, i) == _has_window(config, first)
    ]
    words = [store.tokenizer.decode([i]) for i in rows.tokens[0, :_TOKENS_SHOWN].tolist()]
    plots.latent_usage(
        np.stack(alike).astype(np.float32), words, out, has_window=_has_window(config, first)
    )


def _write_sample(
    config: Config,
    run_dir: Path,
    store: TokenStore,
    model: LanguageModel,
    step: int,
) -> str:
    """Adds what the model writes after `step` to samples.txt, in place of older text from there."""
    pieces = generate(
        model,
        store.tokenizer,
        [""],
        tokens=config.train.sample_tokens,
        sampling=Sampling(),
        seed=config.train.seed,
    )
    text = continuations(pieces, 1)[0]
    if not is_first():
        return text
    path = run_dir / "samples.txt"
    older = path.read_bytes() if path.exists() else b""
    later = [m for m in re.finditer(rb"^--- step (\d+)$", older, re.M) if int(m[1]) >= step]
    if later:
        os.truncate(path, later[0].start())
    with path.open("a", encoding="utf-8") as file:
        file.write(f"--- step {step}\n{text}\n\n")
    return text
