"""Every op that mixes tokens by softmaxes, as one kind of thing that one test body can run on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from latte.ops.attention import AttentionState, attention
from latte.ops.latte import LatteState, bidirectional, latte
from latte.ops.macchiato import MacchiatoState, macchiato
from latte.ops.macchiato import bidirectional as macchiato_bidirectional
from tests.ops import helpers

KINDS = ("normal", "jumps", "rising", "zero", "ten thousand")
"""Kinds of logits: jumps are of ±1e4, rising is by 50 a step, the last two are all equal."""

KEY = 4
"""Channels of a window's queries and keys: 1/√4 is exact in binary, and so are hard logits."""

BIG = 128
"""Size of the queries of hard logits, a power of two as well."""


def logits(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Logits [B, T, …] of a kind in KINDS."""
    if kind == "ten thousand":
        return np.full(shape, 1e4)
    return helpers.logits(rng, kind, shape)


@dataclass(frozen=True, eq=False)
class Mixer:
    """An op: arrays, segment ids and state to y and a state (None where it has none)."""

    name: str
    op: Callable
    kind: Literal["latte", "attention", "macchiato"]
    settings: dict[str, Any] = field(default_factory=dict)
    heads: int = 2
    kv_heads: int = 2
    causal: bool = True
    carries: bool = True

    def __call__(self, arrays: dict, segment_ids: Any, state: Any = None, impl: str = "xla"):
        given = {"state": state} if self.carries else {}
        out = self.op(**arrays, **self.settings, segment_ids=segment_ids, impl=impl, **given)
        return out if isinstance(out, tuple) else (out, None)

    def arrays(
        self,
        rng: np.random.Generator,
        batch: int,
        length: int,
        *,
        latents: int = 3,
        size: int = 3,
        kind: str = "normal",
    ) -> dict[str, np.ndarray]:
        """Random inputs; `kind` is that of the key logits, and of the latents' weights."""

        def heads(count: int, channels: int) -> tuple[int, ...]:
            return batch, length, count, channels

        arrays = {"v": rng.normal(size=heads(self.kv_heads, size))}
        if self.kind != "attention":
            states = latents + (self.kind == "macchiato")
            arrays["q"] = logits(rng, kind, heads(self.heads, states))
            arrays["k"] = logits(rng, kind, heads(self.heads, latents))
        if self.kind == "latte":
            return arrays
        q = rng.normal(size=heads(self.heads, KEY))
        k = rng.normal(size=heads(self.kv_heads, KEY))
        if kind != "normal":
            # Products of other channels would round logits of 1e4 before any op sees them, and a
            # query of 1 would multiply the rounding of its own gradient by them.
            q = np.broadcast_to(BIG * np.eye(KEY)[0], q.shape)
            k[..., 0] = logits(rng, kind, k.shape[:3]) / (BIG * KEY**-0.5)
        names = ("q", "k") if self.kind == "attention" else ("qw", "kw")
        return arrays | dict(zip(names, (q, k), strict=True))

    def past(
        self,
        rng: np.random.Generator,
        segment: np.ndarray,
        *,
        latents: int = 3,
        size: int = 3,
        kind: str = "normal",
    ) -> Any:
        """A state that some earlier call may have left; `segment` [B] is −1 where it is empty."""
        batch, segment = len(segment), segment.astype(np.int32)
        parts = []
        if self.kind != "attention":
            shape = batch, self.heads, latents
            empty = (segment < 0)[:, None, None]
            # One of the tokens seen has the largest logit, so l is at least 0.
            parts.append(
                LatteState(
                    np.where(empty, -np.inf, logits(rng, kind, shape)),
                    np.where(empty, 0, rng.random(shape)),
                    np.where(empty[..., None], 0, rng.normal(size=(*shape, size))),
                    segment,
                )
            )
        if self.kind != "latte":
            window = self.settings["window"]
            room = 7 if window is None else (window[0] if isinstance(window, tuple) else window - 1)
            k, v = (rng.normal(size=(batch, room, self.kv_heads, n)) for n in (KEY, size))
            seen = np.minimum(rng.integers(1, room + 2, batch), room)
            seen = np.arange(room) >= room - np.where(segment < 0, 0, seen)[:, None]
            parts.append(AttentionState(k, v, seen, segment))
        return parts[0] if len(parts) == 1 else MacchiatoState(*parts)


def meaning(state: Any) -> Any:
    """What later tokens can read of a state: m + l, never m alone, and of a cache what was seen."""
    if isinstance(state, MacchiatoState):
        return [meaning(part) for part in state]
    if isinstance(state, LatteState):
        return state.m + state.l, state.s, state.segment
    if isinstance(state, AttentionState):
        seen = state.seen[:, :, None, None]
        return jnp.where(seen, state.k, 0), jnp.where(seen, state.v, 0), state.seen, state.segment
    return state


def run(op: Callable) -> Callable:
    """Arrays, segment_ids and state, as a tree, to what the result shows, and its gradients."""

    def f(inputs):
        given = {name: inputs[name] for name in ("segment_ids", "state")}
        y, state = op(**inputs["arrays"], **given)
        return y, meaning(state)

    return helpers.outputs_and_gradients(f)


def _attention(name: str, window: Any, *, carries: bool = True, causal: bool = True, **rest: Any):
    heads = rest.pop("heads", 2)
    settings = {"window": window, **rest}
    return Mixer(
        f"attention, {name}",
        attention,
        "attention",
        settings,
        heads=heads,
        causal=causal,
        carries=carries,
    )


MIXERS = (
    Mixer("latte", latte, "latte"),
    Mixer("latte, both directions", bidirectional, "latte", causal=False, carries=False),
    _attention("full", None),
    _attention("window", 5),
    _attention("wide window, grouped heads", 100, heads=4),
    _attention("left window, soft cap", (9, 0), softcap=5.0),
    _attention("window of one, scale", 1, scale=0.25),
    _attention("both sides", (3, 6), carries=False, causal=False),
    _attention("the future", (0, None), carries=False, causal=False),
    _attention("everything", (None, None), carries=False, causal=False, heads=4),
    Mixer("macchiato", macchiato, "macchiato", {"window": 5}),
    Mixer(
        "macchiato, grouped heads, soft cap",
        macchiato,
        "macchiato",
        {"window": 70, "softcap": 5.0, "scale": 0.25},
        heads=4,
    ),
    Mixer(
        "macchiato, both directions",
        macchiato_bidirectional,
        "macchiato",
        {"window": 4},
        heads=4,
        causal=False,
        carries=False,
    ),
)
