"""The device's half of serving: rows that are drawn from together, each of another request.

A slot is a row of one array of states. A prompt is read alone, in chunks of a few lengths so that
few shapes are compiled, and its state is put into a free slot; a step draws a token in every slot.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from latte.model import LanguageModel, ModelState

CHUNK = 512
"""Most tokens of a prompt that are read at once, while other requests wait."""
_SHORTEST = 16
MOST_ALTERNATIVES = 20
"""Likeliest tokens whose log-probabilities a request can ask for."""
_PROMPT, _PADDING = 0, 1


class Slots(NamedTuple):
    """Logits of each slot's next token, and its state."""

    logits: Float[Array, "S V"]
    state: ModelState


class Settings(NamedTuple):
    """How each slot's next token is drawn; `latte.generate.Sampling` has the words.

    drawn: tokens that the request has drawn; with its seed it decides the draw, whatever slot the
        request is in and whatever is beside it.
    """

    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    seed: Int[Array, " S"]
    drawn: Int[Array, " S"]


class Drawn(NamedTuple):
    """A token a slot, its log-probability, and the likeliest tokens with theirs."""

    token: Int[Array, " S"]
    logprob: Float[Array, " S"]
    likeliest: Int[Array, "S K"]
    logprobs: Float[Array, "S K"]


def empty_slots(model: LanguageModel, count: int, room: int, vocab: int) -> Slots:
    """Slots in which nothing has been read."""
    return Slots(jnp.zeros((count, vocab)), model.backbone.empty_state(count, room))


@partial(jax.jit, static_argnames="vocab", donate_argnames="state")
def _read(
    model: LanguageModel,
    state: ModelState,
    tokens: Int[Array, "1 C"],
    segment_ids: Int[Array, "1 C"],
    *,
    vocab: int,
) -> tuple[Float[Array, "1 V"], ModelState]:
    hidden, state = model.backbone(tokens, segment_ids=segment_ids, state=state)  # pyright: ignore
    return model.logits(hidden[:, -1])[:, :vocab], state


def chunks(count: int) -> list[int]:
    """How many tokens of a prompt of `count` to read at a time: a rest first, then whole chunks."""
    rest = count % CHUNK or CHUNK
    return [rest] + [CHUNK] * ((count - rest) // CHUNK)


def read_chunk(
    model: LanguageModel, state: ModelState, tokens: list[int], *, vocab: int
) -> tuple[Float[Array, "1 V"], ModelState]:
    """Reads a part of a prompt: padding on the left of the first is a document of its own."""
    length = max(_SHORTEST, 1 << (len(tokens) - 1).bit_length())
    row = np.zeros((1, length), np.int32)
    segment_ids = np.full((1, length), _PADDING, np.int32)
    row[0, length - len(tokens) :] = tokens
    segment_ids[0, length - len(tokens) :] = _PROMPT
    return _read(model, state, jnp.asarray(row), jnp.asarray(segment_ids), vocab=vocab)


@partial(jax.jit, donate_argnames="slots")
def put(
    slots: Slots, slot: Int[Array, ""], logits: Float[Array, "1 V"], state: ModelState
) -> Slots:
    """Puts what was read into a slot; layers' states have their rows on the second axis."""

    def into(axis: int, whole: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, row.astype(whole.dtype), slot, axis)

    layers = jax.tree.map(partial(into, 1), slots.state.layers, state.layers)
    rest = jax.tree.map(
        partial(into, 0), slots.state._replace(layers=()), state._replace(layers=())
    )
    return Slots(into(0, slots.logits, logits), rest._replace(layers=layers))


@partial(jax.jit, donate_argnames="slots")
def draw(model: LanguageModel, slots: Slots, settings: Settings) -> tuple[Slots, Drawn]:
    """Draws a token in every slot and reads it."""
    logprobs = jax.nn.log_softmax(slots.logits, axis=-1)
    token = _sample(slots.logits, settings)
    count = min(MOST_ALTERNATIVES, logprobs.shape[1])
    values, likeliest = jax.lax.top_k(logprobs, count)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
    hidden, state = model.backbone(token[:, None], state=slots.state)
    assert state is not None
    logits = model.logits(hidden[:, -1])[:, : slots.logits.shape[1]]
    return Slots(logits, state), Drawn(token, chosen, likeliest, values)


def _sample(logits: Float[Array, "S V"], settings: Settings) -> Int[Array, " S"]:
    """`latte.generate.sample` with settings of its own for every row."""
    temperature = jnp.asarray(settings.temperature)
    scaled = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
    cuts = jnp.any((settings.top_k > 0) | (settings.top_p < 1))
    kept = jax.lax.cond(cuts, _cut, lambda logits, settings: logits, scaled, settings)

    def one(seed: Array, drawn: Array, logits: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), drawn), logits)

    likely = jax.vmap(one)(settings.seed, settings.drawn, kept)
    return jnp.where(temperature > 0, likely, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def _cut(logits: Float[Array, "S V"], settings: Settings) -> Float[Array, "S V"]:
    """Leaves each row its likeliest tokens."""
    ranked = jnp.sort(logits, axis=-1, descending=True)
    top_k = settings.top_k[:, None]
    kept = (top_k == 0) | (jnp.arange(ranked.shape[-1]) < top_k)
    shares = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    kept &= jnp.cumsum(shares, axis=-1) - shares < settings.top_p[:, None]
    least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)
