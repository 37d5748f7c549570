"""Token mixing in plain PyTorch, in chunks: Latte, RG-LRU, short convolution, attention.

A row of a call holds its real tokens first; what fills it up stands behind them, where nothing that
is causal sees it, and leaves no trace in a state. Every function takes the state before the call
(None for the empty one) and returns the one after it; sums and states are float32 or wider.

Letters: B batch · T length · H heads · G key-value heads · N latents a head · D values a head ·
K width of a key · W channels · n chunks · C tokens of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 16
"""Tokens whose pairs are written out, latent by latent."""
_BLOCK = 1024
"""Tokens that are worked on at once."""
_QUERIES = 128
"""Queries of a block of windowed attention, at least."""
_DECAY_SCALE = 8.0
"""log a at an open gate, as a multiple of −softplus(Λ)."""


class Place(NamedTuple):
    """Where the tokens of a call stand.

    run [B, T]: number of the document; 0 goes on in that of the state.
    first [B, T]: a token begins its document.
    real [B, T]: a token is none that fills its row up.
    positions [B, T]: in the document.
    lengths [B]: real tokens.
    """

    run: Tensor
    first: Tensor
    real: Tensor
    positions: Tensor
    lengths: Tensor


def in_full_precision(op: Callable) -> Callable:
    """Keeps autocast out of an op, which chooses its own precision."""

    @functools.wraps(op)
    def wrapped(x: Tensor, *rest, **settings):
        with torch.autocast(x.device.type, enabled=False):
            return op(x, *rest, **settings)

    return wrapped


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _last(x: Tensor, place: Place, count: int) -> Tensor:
    """The `count` tokens of x [B, count + T, …] that end with each row's last real one."""
    at = place.lengths[:, None] + torch.arange(count, device=x.device)
    return x.gather(1, at.view(*at.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


# --- Latte -------------------------------------------------------------------------------------


class LatteState(NamedTuple):
    """Of each latent: m [B, H, N], the largest logit seen (−∞ for none), z = Σ exp(k − m), and
    u [B, H, N, D] = Σ exp(k − m) v."""

    m: Tensor
    z: Tensor
    u: Tensor


@in_full_precision
def latte(
    p: Tensor, k: Tensor, v: Tensor, place: Place, state: LatteState | None
) -> tuple[Tensor, LatteState]:
    """Causal latent attention: y_t = Σ_n p_tn Σ_{s≤t} softmax_s(k_sn) v_s, within documents.

    p, k [B, T, H, N]: weights of the latents, and logits of the tokens in each. v [B, T, H, D].
    """
    dtype, (p, k, v) = v.dtype, map(_wide, (p, k, v))
    if state is None:
        shape = k.shape[0], *k.shape[2:]
        u = v.new_zeros(*shape, v.shape[-1])
        state = LatteState(k.new_full(shape, -math.inf), k.new_zeros(shape), u)
    k = k.masked_fill(~place.real[:, :, None, None], -math.inf)
    run, outputs = place.run, []
    before = torch.zeros_like(run[:, 0])
    for start in range(0, k.shape[1], _BLOCK):
        part = slice(start, start + _BLOCK)
        y, state = _latte_block(p[:, part], k[:, part], v[:, part], run[:, part], before, state)
        before = run[:, part][:, -1]
        outputs.append(y)
    return torch.cat(outputs, dim=1).to(dtype), state


def _latte_block(
    p: Tensor, k: Tensor, v: Tensor, run: Tensor, before: Tensor, state: LatteState
) -> tuple[Tensor, LatteState]:
    """A few chunks at once: each read alone, then the states between them, then their tokens."""
    length = k.shape[1]
    size = min(_CHUNK, length)
    p, k, v = (_split(x, size, fill) for x, fill in ((p, 0.0), (k, -math.inf), (v, 0.0)))
    run = torch.cat([run, run[:, -1:].expand(-1, -length % size)], dim=1)
    run = run.view(run.shape[0], -1, size)
    starts = _chunk_states(k, v, run, before, state)
    ends = torch.cat([before[:, None], run[:, :, -1]], dim=1)
    inner = LatteState(*(x[:, :, :-1] for x in starts))
    y = _chunk_outputs(p, k, v, run, ends[:, :-1], inner)
    y = y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]
    return y, LatteState(*(x[:, :, -1] for x in starts))


def _split(x: Tensor, size: int, fill: float) -> Tensor:
    """[B, T, H, X] in chunks [B, H, n, C, X], the last one filled up."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size), value=fill)
    return x.view(x.shape[0], -1, size, *x.shape[2:]).permute(0, 3, 1, 2, 4)


def _finite(m: Tensor) -> Tensor:
    """A maximum as a reference for exponents: 0 where nothing was seen."""
    return m.masked_fill(m == -math.inf, 0.0)


def _chunk_states(
    k: Tensor, v: Tensor, run: Tensor, before: Tensor, state: LatteState
) -> LatteState:
    """The states before each of n chunks and after the last: [B, H, n + 1, …]."""
    own = (run == run[:, :, -1:])[:, None, :, :, None]
    k = k.masked_fill(~own, -math.inf)
    # Maxima have no gradient: what they scale is divided by what they scale.
    m = k.detach().amax(dim=3)
    e = torch.exp(k - _finite(m)[:, :, :, None])
    m = torch.cat([state.m[:, :, None], m], dim=2)
    z = torch.cat([state.z[:, :, None], e.sum(dim=3)], dim=2)
    u = torch.cat([state.u[:, :, None], e.transpose(3, 4) @ v], dim=2)

    document = torch.cat([before[:, None], run[:, :, -1]], dim=1)
    count = document.shape[1]
    sees = document[:, :, None] == document[:, None, :]
    sees = sees & torch.ones(count, count, dtype=torch.bool, device=k.device).tril()
    each = m[:, :, None].masked_fill(~sees[:, None, :, :, None], -math.inf)
    most = each.amax(dim=3)
    weights = torch.exp(each - _finite(most)[:, :, :, None])
    return LatteState(
        most, (weights * z[:, :, None]).sum(dim=3), torch.einsum("bhijn,bhjnd->bhind", weights, u)
    )


def _chunk_outputs(
    p: Tensor, k: Tensor, v: Tensor, run: Tensor, document: Tensor, state: LatteState
) -> Tensor:
    """y of every chunk from its tokens' pairs and from the state before it; `document` is its."""
    size = k.shape[3]
    causal = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    pairs = (run[:, :, :, None] == run[:, :, None, :]) & causal
    goes_on = (run == document[:, :, None])[:, None, :, :, None]
    each = k[:, :, :, None].masked_fill(~pairs[:, None, :, :, :, None], -math.inf)
    carried = state.m[:, :, :, None].masked_fill(~goes_on, -math.inf)
    reference = _finite(torch.maximum(each.detach().amax(dim=4), carried))
    e = torch.exp(each - reference[:, :, :, :, None])
    past = torch.exp(carried - reference)
    total = e.sum(dim=4) + past * state.z[:, :, :, None]
    weights = p / total.masked_fill(total == 0, 1.0)
    mixed = torch.einsum("bhctn,bhctsn->bhcts", weights, e)
    return mixed @ v + (weights * past) @ state.u


# --- RG-LRU ------------------------------------------------------------------------------------


@in_full_precision
def rg_lru(
    x: Tensor, r: Tensor, i: Tensor, lam: Tensor, place: Place, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t−1} + √(1−a_t²) σ(i_t) x_t with log a_t = −8 softplus(Λ) σ(r_t).

    x, r, i [B, T, W]; the state is h [B, W]. At a document's first token h = σ(i) x.
    """
    dtype, (x, r, i, lam) = x.dtype, map(_wide, (x, r, i, lam))
    log_a = -_DECAY_SCALE * F.softplus(lam) * torch.sigmoid(r)
    # A root has no slope at 0: there the multiplier counts as 1e-15.
    m = torch.sqrt(torch.clamp(-torch.expm1(2 * log_a), min=1e-30))
    first, real = place.first[..., None], place.real[..., None]
    a = torch.exp(log_a).masked_fill(first, 0.0).masked_fill(~real, 1.0)
    b = (m.masked_fill(first, 1.0) * torch.sigmoid(i) * x).masked_fill(~real, 0.0)
    h = torch.zeros_like(x[:, 0]) if state is None else state
    outputs = []
    for start in range(0, x.shape[1], _BLOCK):
        part = slice(start, start + _BLOCK)
        outputs.append(_linear_recurrence(a[:, part], b[:, part], h))
        h = outputs[-1][:, -1]
    return torch.cat(outputs, dim=1).to(dtype), h


def _linear_recurrence(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """h_t = a_t h_{t−1} + b_t, in log₂ T passes that double what each token has taken in."""
    b = torch.cat([b[:, :1] + a[:, :1] * h[:, None], b[:, 1:]], dim=1)
    reach = 1
    while reach < b.shape[1]:
        b = torch.cat([b[:, :reach], b[:, reach:] + a[:, reach:] * b[:, :-reach]], dim=1)
        a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], dim=1)
        reach *= 2
    return b


# --- convolution -------------------------------------------------------------------------------


@in_full_precision
def conv(x: Tensor, taps: Tensor, place: Place, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """y_t = Σ_j taps_j x_{t−j} within documents; the state is the last inputs [B, taps − 1, W]."""
    (batch, length, width), reach = x.shape, taps.shape[0] - 1
    dtype, wide = x.dtype, _wide(taps)
    if state is None:
        state = x.new_zeros(batch, reach, width)
    inputs = torch.cat([state.to(dtype), x], dim=1)
    runs = F.pad(place.run, (reach, 0))
    y = torch.zeros_like(_wide(x))
    for j in range(reach + 1):
        part = slice(reach - j, reach - j + length)
        own = (runs[:, part] == place.run)[..., None]
        y = y + wide[j] * inputs[:, part].masked_fill(~own, 0.0)
    own = _last(runs, place, reach) == place.run[:, -1:]
    return y.to(dtype), _last(inputs, place, reach).masked_fill(~own[..., None], 0.0)


# --- attention ---------------------------------------------------------------------------------


class AttentionState(NamedTuple):
    """Keys [B, S, G, K] and values [B, S, G, D] that later tokens may read, and which of them are
    of the last token's document, [B, S]."""

    k: Tensor
    v: Tensor
    seen: Tensor


@in_full_precision
def attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, place: Place, state: AttentionState | None
) -> tuple[Tensor, AttentionState]:
    """Softmax attention within documents, to the last `window` tokens or to all.

    q [B, T, H, K]. The state of a window is its last keys and values; without one it grows.
    """
    batch = q.shape[0]
    if state is None:
        kept = 0 if window is None else window - 1
        shapes = [(batch, kept, *x.shape[2:]) for x in (k, v)]
        seen = torch.zeros(batch, kept, dtype=torch.bool, device=q.device)
        state = AttentionState(k.new_zeros(shapes[0]), v.new_zeros(shapes[1]), seen)
    k, v = torch.cat([state.k.to(k.dtype), k], dim=1), torch.cat([state.v.to(v.dtype), v], dim=1)
    old = torch.where(state.seen, 0, -1).to(place.run.dtype)
    runs = torch.cat([old, place.run], dim=1)
    if window is None:
        y = _attend_to_all(q, k, v, place.run, runs)
        real = torch.cat([torch.ones_like(state.seen), place.real], dim=1)
        return y, AttentionState(k, v, (runs == runs[:, -1:]) & real)
    y = _attend_to_window(q, k, v, runs, window)
    # A window of one token keeps none.
    seen = _last(runs, place, window - 1) == runs[:, -1:]
    return y, AttentionState(_last(k, place, window - 1), _last(v, place, window - 1), seen)


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, run_q: Tensor, run_k: Tensor) -> Tensor:
    """A block of queries at a time, so that no mask has T × S places."""
    length, keys, outputs = q.shape[1], k.shape[1], []
    at = torch.arange(keys, device=q.device)
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        reach = keys - length + stop
        causal = at[:reach] <= at[keys - length + start : reach, None]
        mask = (run_q[:, start:stop, None] == run_k[:, None, :reach]) & causal
        outputs.append(_softmax(q[:, start:stop], k[:, :reach], v[:, :reach], mask))
    return torch.cat(outputs, dim=1)


def _attend_to_window(q: Tensor, k: Tensor, v: Tensor, runs: Tensor, window: int) -> Tensor:
    """Blocks of queries, each with its own keys and the window − 1 before them."""
    batch, length = q.shape[:2]
    size = min(max(_QUERIES, window), length)
    span = size + window - 1
    fill = -length % size
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, fill)) for x in (q, k, v))
    runs = F.pad(runs, (0, fill), value=-2)
    k, v = (x.unfold(1, span, size).movedim(-1, 2).flatten(0, 1) for x in (k, v))
    runs = runs.unfold(1, span, size).flatten(0, 1)
    at = torch.arange(span, device=q.device)
    ahead = at[window - 1 :, None] - at
    mask = (runs[:, window - 1 :, None] == runs[:, None, :]) & (ahead >= 0) & (ahead < window)
    y = _softmax(q.view(-1, size, *q.shape[2:]), k, v, mask)
    return y.reshape(batch, -1, *y.shape[2:])[:, :length]


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention [B, T, H, D] of the pairs in `mask` [B, T, S]; query heads share keys in order."""
    share = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(share, dim=2).transpose(1, 2) for x in (k, v))
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask[:, None])
    return y.transpose(1, 2)
