"""flash-linear-attention's kernels for linear time, where torch and fla are installed (CUDA only).

`chunk_gla` (gated linear attention: H heads of N keys and D values, a gate a key) does what Latte's
recurrence does but for its normaliser, `chunk_hgrn` what the RG-LRU does but for its gates, which
it is given. Both are checked against their recurrences, on a short sequence, before they are timed.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from timing import median_ms

# A package that torch's friends look for has the name of a file in this folder.
_here = sys.path.pop(0)
try:
    import torch
    from fla.ops.gla import chunk_gla
    from fla.ops.hgrn import chunk_hgrn
except ImportError:
    torch = None
finally:
    sys.path.insert(0, _here)

CHECKED = 256
"""Tokens of the sequence on which a kernel is compared with its recurrence."""


@dataclass(frozen=True)
class Peer:
    """One kernel: inputs for a batch and a length, and its definition in float32."""

    op: str
    name: str
    function: Callable
    definition: Callable
    inputs: Callable[[int, int], list[Any]]


def available() -> bool:
    return torch is not None and torch.cuda.is_available()


def peers(heads: int, latents: int, size: int, width: int) -> dict[str, Peer]:
    """The peer of each op of ours that has one."""

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def gate(*shape: int) -> Any:
        return torch.nn.functional.logsigmoid(normal(*shape)) / 16

    def of_gla(batch: int, length: int) -> list[Any]:
        rows = batch, length, heads
        sizes = latents, latents, size
        return [*(normal(*rows, channels) for channels in sizes), gate(*rows, latents)]

    def of_hgrn(batch: int, length: int) -> list[Any]:
        return [normal(batch, length, width), gate(batch, length, width)]

    def gla(q: Any, k: Any, v: Any, g: Any) -> Any:
        return chunk_gla(q, k, v, g, scale=1.0)[0]

    def hgrn(x: Any, g: Any) -> Any:
        return chunk_hgrn(x, g)[0]

    return {
        "latte": Peer(f"latte N{latents}", "fla chunk_gla", gla, _gla, of_gla),
        "rg_lru": Peer("rg_lru", "fla chunk_hgrn", hgrn, _hgrn, of_hgrn),
    }


def _gla(q: Any, k: Any, v: Any, g: Any) -> Any:
    state, out = 0.0, []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((q[:, t, :, :, None] * state).sum(dim=-2))
    return torch.stack(out, dim=1)


def _hgrn(x: Any, g: Any) -> Any:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = state * g[:, t].exp() + x[:, t]
        out.append(state)
    return torch.stack(out, dim=1)


def _step(function: Callable, inputs: list[Any], cotangent: Any) -> list[Any]:
    """The output and the gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, cotangent)]


def largest_error(peer: Peer) -> float:
    """Of output and gradients on a short sequence, norm over norm."""
    inputs = peer.inputs(1, CHECKED)
    cotangent = torch.randn_like(peer.function(*inputs))
    found = _step(peer.function, inputs, cotangent)
    defined = _step(peer.definition, [x.float() for x in inputs], cotangent.float())
    pairs = zip(found, defined, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def times(peer: Peer, batch: int, length: int, calls: int) -> Iterator[tuple[str, float, int, int]]:
    """("forward" or "step", milliseconds, bytes of the inputs, bytes of the output)."""
    inputs = peer.inputs(batch, length)
    y = peer.function(*inputs)
    cotangent = torch.randn_like(y)
    sizes = sum(x.nbytes for x in inputs), y.nbytes

    def forward() -> None:
        with torch.no_grad():
            peer.function(*inputs)

    def step() -> None:
        _step(peer.function, inputs, cotangent)

    for what, function in {"forward": forward, "step": step}.items():
        yield what, median_ms(function, torch.cuda.synchronize, calls), *sizes
