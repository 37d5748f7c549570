"""Pictures are drawn from any data that a run can leave behind."""

import json

import numpy as np
import pytest

from latte import plots


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1, "loss": None}],
        [{"step": 1, "loss": 3.0}],
        [{"step": 1, "heldout_loss": 3.0}],
        [{"step": s, "loss": None if s == 4 else 1e9 if s == 7 else 3.0} for s in range(1, 30)]
        + [{"step": 29, "heldout_loss": 2.0, "heldout_bits_per_byte": 1.0}],
    ],
)
@pytest.mark.parametrize("log_x", [False, True])
def test_loss_curve(tmp_path, records, log_x):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(r) + "\n" for r in records))
    plots.loss_curve(metrics, tmp_path / "plots" / "loss.png", title="a run", log_x=log_x)
    assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("layers", "heads", "states", "window"), [(1, 1, 1, False), (2, 5, 17, True)]
)
def test_latent_usage_with_any_tokens(tmp_path, layers, heads, states, window):
    tokens = ["$x$", "\n", " ", "\t", "a very long token", "é", "\ufffd", "\\frac", "^{"]
    p = np.random.default_rng(0).dirichlet(np.ones(states), (layers, heads, len(tokens)))
    plots.latent_usage(p, tokens, tmp_path / "p.png", has_window=window)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_latent_entropy(tmp_path):
    plots.latent_entropy([0.5, 0.9], None, tmp_path / "a.png")
    plots.latent_entropy([0.5], [0.1], tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
