"""Pictures of a run: each function takes data and writes one PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from latte.data.stats import SubsetStats
from latte.metrics import read_metrics


def loss_curve(metrics: Path, out: Path, *, title: str = "", log_x: bool = False) -> None:
    """Training and held-out loss by step, from a metrics.jsonl.

    Where evaluations give heldout_bits_per_byte, a second axis reads the same curves in bits per
    byte. The title says the final figures too. Steps without a finite loss are gaps.
    """
    records = list(read_metrics(metrics))
    train = [(r["step"], _or_nan(r["loss"])) for r in records if "loss" in r]
    heldout = [(r["step"], _or_nan(r["heldout_loss"])) for r in records if "heldout_loss" in r]
    bits = [r["heldout_bits_per_byte"] for r in records if r.get("heldout_bits_per_byte")]

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    steps, losses = np.array(train, float).reshape(-1, 2).T
    if train:
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="train")
        smooth = _smooth(losses, reach=max(4, len(losses) // 100))
        axes.plot(steps, smooth, color="tab:blue", linewidth=1.8, label="train, smoothed")
        if np.isfinite(smooth).any():
            axes.set_ylim(*_limits([*smooth, *(loss for _, loss in heldout)]))
    if heldout:
        axes.plot(*zip(*heldout, strict=True), "o-", color="tab:orange", ms=5, label="held out")
        if bits:
            factor = bits[-1] / heldout[-1][1]
            scales = (lambda y: y * factor, lambda y: y / factor)
            second = axes.secondary_yaxis("right", functions=scales)
            second.set_ylabel("bits per byte of text")
    if log_x:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    if train or heldout:
        axes.legend(frameon=False)
    final = [f"train {smooth[-1]:.3f}"] if train and np.isfinite(smooth[-1]) else []
    final += [f"held out {heldout[-1][1]:.3f} nats per token"] if heldout else []
    final += [f"{bits[-1]:.3f} bits per byte"] if bits else []
    axes.set_title("\n".join(part for part in (title, "at the end: " + ", ".join(final)) if part))
    _save(figure, out)


def latent_usage(
    p: Float[np.ndarray, "layers heads T states"],
    tokens: Sequence[str],
    out: Path,
    *,
    has_window: bool,
    title: str = "",
    heads_shown: int = 3,
) -> None:
    """p(l|t), the probability of each state at each token, like the paper's Figure 7.

    A row a layer, a column a head (the first `heads_shown`). With `has_window`, state 0 is the
    sliding window and the others are latents. All panels share one colour scale. 25 tokens fit.
    """
    layers, heads, length, states = p.shape
    columns = min(heads, heads_shown)
    figure = Figure(
        figsize=(1.2 + columns * max(2.4, 0.15 * length), 1.6 + layers * max(1.4, 0.11 * states)),
        layout="constrained",
    )
    grid = figure.subplots(layers, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for layer in range(layers):
        for head in range(columns):
            axes = grid[layer, head]
            image = axes.imshow(
                p[layer, head].T, aspect="auto", vmin=0, vmax=float(p.max()), cmap="viridis"
            )
            if has_window:
                axes.axhline(0.5, color="white", linewidth=0.8)
            axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
            axes.set_yticks(*_state_ticks(states, has_window), fontsize=7)
            axes.set_xticks(range(length), [_visible(t) for t in tokens], rotation=90, fontsize=7)
    assert image is not None
    figure.supylabel("state", fontsize=9)
    figure.supxlabel("token", fontsize=9)
    figure.colorbar(image, ax=grid, label="p(state | token)", fraction=0.03, aspect=40, pad=0.01)
    figure.suptitle(title or "Which states each token reads", fontsize=10)
    _save(figure, out)


def latent_entropy(
    entropy: Sequence[float],
    window_mass: Sequence[float] | None,
    out: Path,
    *,
    title: str = "",
) -> None:
    """Per layer: how evenly tokens use the states, and how much of them goes to the window.

    entropy: of p(l|t), as a share of its maximum (1: all states alike; near 0: collapse).
    window_mass: p of the window's state; None for models without a window.
    """
    layers = np.arange(1, len(entropy) + 1)
    figure = Figure(figsize=(max(3.6, 1.8 + 0.45 * len(layers)), 3.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 if window_mass is None else 0.4
    shift = 0 if window_mass is None else width / 2
    axes.bar(layers - shift, entropy, width, label="entropy of p(l|t) / its maximum")
    if window_mass is not None:
        axes.bar(layers + shift, window_mass, width, label="mass of the window's state")
    axes.set_xticks(layers)
    axes.set_ylim(0, 1)
    axes.set_xlabel("layer")
    axes.set_title(title or "Use of the states, layer by layer", fontsize=10)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8)
    _save(figure, out)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _smooth(values: Float[np.ndarray, " n"], reach: int) -> Float[np.ndarray, " n"]:
    """The median over `reach` values on either side (NaN left out): lone spikes do not move it."""
    smooth = np.full(len(values), np.nan)
    for i in range(len(values)):
        # Where the curve begins it is steep: as far ahead as back, so that it is not bent.
        before = min(reach, i)
        around = values[i - before : i + before + 1]
        around = around[np.isfinite(around)]
        if len(around):
            smooth[i] = np.median(around)
    return smooth


def _limits(curves: Sequence[float]) -> tuple[float, float]:
    """Room for the curves; lone spikes of the raw losses would flatten the rest."""
    finite = [value for value in curves if np.isfinite(value)]
    margin = 0.06 * max(max(finite) - min(finite), 1e-3)
    return min(finite) - margin, max(finite) + margin


def _state_ticks(states: int, has_window: bool) -> tuple[list[int], list[str]]:
    """A tick for the window and for about every fourth latent; states count from 1 without it."""
    first = 0 if has_window else 1
    step = max(1, round(states / 5))
    rows = [0, *range(step, states, step)]
    names = [str(row + first) for row in rows]
    if has_window:
        names[0] = "window"
    return rows, names


def _visible(token: str) -> str:
    """A token with its spaces and line ends to be seen, and short enough for an axis."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("$", r"\$")
    return shown if len(shown) <= 10 else shown[:9] + "…"


def corpus(
    stats: Sequence[SubsetStats],
    lengths: Mapping[str, Int[np.ndarray, " n"]],
    out: Path,
    *,
    title: str = "",
) -> None:
    """A token store: tokens and bytes a token of each subset of the training split, and lengths.

    lengths: of documents of each subset, in tokens.
    """
    train = [some for some in stats if some.split == "train"]
    names = [some.subset for some in train]
    figure = Figure(figsize=(13, 1.6 + 0.35 * max(6, len(names))), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.barh(names, [some.tokens / 1e6 for some in train], color="tab:blue")
    left.set_xlabel("million tokens")
    middle.barh(names, [some.bytes_per_token for some in train], color="tab:orange")
    middle.set_xlabel("bytes per token")
    middle.set_yticks([])
    longest = max(int(some.max()) for some in lengths.values())
    edges = np.geomspace(1, max(2, longest), 40)
    for name in names:
        right.hist(lengths[name], edges, histtype="step", density=False, label=name)
    right.set_xscale("log")
    right.set_xlabel("tokens of a document")
    right.set_ylabel("documents, of a sample")
    right.legend(frameon=False, fontsize="small")
    for axes in (left, middle):
        axes.invert_yaxis()
        axes.grid(alpha=0.25, axis="x")
    figure.suptitle(title)
    _save(figure, out)


def _save(figure: Figure, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
