"""Layers and models from their equations in NumPy, over one document [T, D] and all its pairs."""

from typing import Any

import jax
import numpy as np

from latte.layers import (
    GLU,
    Attention,
    Conv,
    GeluMLP,
    Latte,
    LayerNorm,
    Macchiato,
    Mixer,
    Recurrence,
    RMSNorm,
)
from latte.model import Backbone, Block, LanguageModel

EPSILON = 1e-6
"""Added to the variance by norms."""


def softmax(z, axis=-1):
    e = np.exp(z - z.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def turned(x, angles, theta):
    """Pair i of the channels [..., D] as one complex number, turned by angles [...] · θ^(−2i/D)."""
    half = x.shape[-1] // 2
    spin = np.exp(1j * np.asarray(angles)[..., None] * theta ** (-2 * np.arange(half) / (2 * half)))
    z = (x[..., :half] + 1j * x[..., half:]) * spin
    return np.concatenate([z.real, z.imag], axis=-1)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def norm(layer: RMSNorm | LayerNorm, x):
    if isinstance(layer, RMSNorm):
        return rms_norm(x, layer.scale)
    return rms_norm(x - x.mean(axis=-1, keepdims=True), layer.scale) + layer.bias


def mlp(layer: GeluMLP | GLU, x):
    """GELU is taken by its approximation with tanh (Hendrycks and Gimpel, 2016)."""
    hidden = x @ layer.project_in.weight
    if isinstance(layer, GLU):
        gate = x @ layer.project_gate.weight
        hidden = gate * sigmoid(gate) * hidden
    else:
        inner = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
        hidden = hidden * (1 + np.tanh(inner)) / 2
    return hidden @ layer.project_out.weight


def heads(layer: Any, x, count: int):
    """A projection's output, [T, H, D]."""
    return (x @ layer.weight).reshape(len(x), count, -1)


def convolution(taps, x, causal: bool):
    """Equation 18, with the K taps that its text says (the sum as printed has K + 1)."""
    behind = np.arange(len(taps)) - (0 if causal else (len(taps) - 1) // 2)
    y = np.zeros_like(x)
    for t in range(len(x)):
        for tap, back in zip(taps, behind, strict=True):
            if 0 <= t - back < len(x):
                y[t] += tap * x[t - back]
    return y


def rg_lru(layer: Any, x):
    """Equations 1 to 4 of De et al. (2024); a document's first input enters whole."""

    def gate(linear, x):
        groups = x.reshape(len(linear.weight), -1)
        mixed = [group @ weight for group, weight in zip(groups, linear.weight, strict=True)]
        return sigmoid(np.concatenate(mixed) + linear.bias)

    h, hs = np.zeros(x.shape[1]), []
    for t, token in enumerate(x):
        log_a = -8 * np.log1p(np.exp(layer.lam)) * gate(layer.gate_decay, token)
        a = np.exp(log_a) if t else 0.0
        h = a * h + np.sqrt(1 - a**2) * gate(layer.gate_input, token) * token
        hs.append(h)
    return np.stack(hs)


def source(layer: Mixer, x):
    """What logits, queries and keys are made from."""
    if isinstance(layer, Conv):
        return convolution(layer.taps, x, layer.causal)
    if isinstance(layer, Recurrence):
        y = rg_lru(layer.forward, x)
        if layer.backward is not None:
            y = y + rg_lru(layer.backward, x[::-1])[::-1]
        return rms_norm(y, layer.norm.scale)
    return x


def seen(length: int, window: int | None, causal: bool):
    """Which tokens s a token t sees [t, s]; a window of W holds W keys, the token itself too."""
    ahead = np.arange(length)[:, None] - np.arange(length)
    reach = length if window is None else window
    return (ahead < reach) & (ahead >= 0 if causal else -ahead < reach)


def attention(layer: Any, project_q, project_k, z, v):
    """Equations 1 to 3 (and 17): y [T, H, D] from queries and keys of z [T, D], values v."""
    q, k = heads(project_q, z, layer.heads), heads(project_k, z, layer.kv_heads)
    if layer.theta is not None:
        at = np.arange(len(z))[:, None]
        q, k = turned(q, at, layer.theta), turned(k, at, layer.theta)
    k = np.repeat(k, layer.heads // layer.kv_heads, axis=1)
    logits = np.einsum("thk,shk->hts", q, k) / np.sqrt(q.shape[-1])
    mask = seen(len(z), layer.window, layer.causal)
    return np.einsum("hts,shd->thd", softmax(np.where(mask, logits, -np.inf)), v)


def latents(p, k, v, causal: bool, theta: float | None):
    """Equation 9 or 6: Σ_l p(l|t) Σ_s p(s|l, t) v_s, and with θ VAPOR's R^(t−s) v_s (v1's 22)."""
    length = len(k)
    logits = np.where(seen(length, None, causal)[:, :, None, None], k, -np.inf)
    weights = np.einsum("thn,tshn->tsh", p, softmax(logits, axis=1))
    if theta is None:
        return np.einsum("tsh,shd->thd", weights, v)
    distance = np.arange(length)[:, None, None] - np.arange(length)[:, None]
    values = turned(np.broadcast_to(v, (length, *v.shape)), distance, theta)
    return np.einsum("tsh,tshd->thd", weights, values)


def mixer(layer: Any, x):
    """The output [T, D] of a mixer for one document."""
    z = source(layer.source, x)
    kv_heads = layer.heads if isinstance(layer, Latte) else layer.kv_heads
    v = heads(layer.project_v, x, kv_heads)
    v = np.repeat(v, layer.heads // kv_heads, axis=1)
    if isinstance(layer, Attention):
        y = attention(layer, layer.project_q, layer.project_k, z, v)
    else:
        p = states(layer, x)
        k = heads(layer.project_k, z, layer.heads)
        if isinstance(layer, Latte):
            y = latents(p, k, v, layer.causal, layer.theta)
        else:
            y = latents(p[..., 1:], k, v, layer.causal, None)
            near = attention(layer, layer.project_window_q, layer.project_window_k, x, v)
            y = y + p[..., :1] * near
    return y.reshape(len(x), -1) @ layer.project_out.weight


def sinusoids(length: int, width: int, theta: float):
    """Of positions 0, 1, … (Vaswani et al., 2017): sines, then cosines."""
    angles = np.arange(length)[:, None] * theta ** (-2 * np.arange(width // 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def block_of(backbone: Backbone, layer: int) -> Block:
    repeat, place = divmod(layer, len(backbone.config.pattern))
    return jax.tree.map(lambda leaf: leaf[repeat], backbone.stack.blocks[place])


def stream(backbone: Backbone, tokens, layers: int):
    """The residual stream [T, D] of one document's tokens [T] after so many blocks."""
    config, length = backbone.config, len(tokens)
    x = backbone.embedding.weight[tokens]
    if config.position == "learned":
        x = x + backbone.position_table[:length]
    if config.position == "sinusoidal":
        x = x + sinusoids(length, config.width, config.rope_theta)
    for layer in range(layers):
        block = block_of(backbone, layer)
        x = x + mixer(block.mixer, norm(block.mixer_norm, x))
        x = x + mlp(block.mlp, norm(block.mlp_norm, x))
    return x


def hidden(backbone: Backbone, tokens):
    """The hidden vectors [T, D] of one document's tokens [T]."""
    return norm(backbone.norm, stream(backbone, tokens, backbone.config.layers))


def states(layer: Latte | Macchiato, x):
    """p(l|t) [T, H, L] of a mixer for one document."""
    return softmax(heads(layer.project_q, source(layer.source, x), layer.heads))


def logits(model: LanguageModel, tokens):
    """The logits [T, V] of one document's tokens [T]."""
    table = model.backbone.embedding.weight.T if model.head is None else model.head.weight
    return hidden(model.backbone, tokens) @ table


def wide(tree: Any) -> Any:
    """A layer or model with NumPy's float64 for parameters."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def positions(segment_ids):
    """The position of each token [B, T] in its document."""
    out = np.zeros(np.shape(segment_ids), np.int32)
    for row, ids in zip(out, np.asarray(segment_ids), strict=True):
        for t in range(1, len(ids)):
            row[t] = row[t - 1] + 1 if ids[t] == ids[t - 1] else 0
    return out


def each_document(f, x, segment_ids):
    """f of every document of packed rows x [B, T, …], packed again."""
    rows = []
    for row, starts in zip(x, positions(segment_ids) == 0, strict=True):
        rows.append(np.concatenate([f(part) for part in np.split(row, np.flatnonzero(starts)[1:])]))
    return np.stack(rows)
