"""Text from a model: one pass over the prompts, then a token at a time from the state.

After the prompt, time and memory a token do not grow with the length, except in layers of full
attention, whose cache gets room for the whole text.
"""

import codecs
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from latte.config import MeshConfig
from latte.data.tokenizer import Tokenizer
from latte.errors import UserError
from latte.mesh import WHOLE, constrain, make_mesh
from latte.model import LanguageModel, ModelState
from latte.run import open_run

_PROMPT, _PADDING = 0, 1
"""Segments of a prefilled row: padding on the left is a document of its own."""
_BUCKET = 64
"""Prompts are padded to multiples of this, so that few shapes are compiled."""
_STRIDE = 16
"""Tokens drawn between two looks at what to print."""


class Sampling(NamedTuple):
    """How the next token is drawn.

    temperature: divides the logits; 0 takes the likeliest token.
    top_k: only the k likeliest tokens; 0 for all.
    top_p: only the likeliest tokens that together reach this probability.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0


def sample(logits: Float[Array, "B V"], key: PRNGKeyArray, sampling: Sampling) -> Int[Array, " B"]:
    """Draws a token a row."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        kept = jnp.ones(ranked.shape, bool)
        if sampling.top_k:
            kept &= jnp.arange(ranked.shape[-1]) < sampling.top_k
        if sampling.top_p < 1:
            # A token is kept when those before it fall short of top_p: the first one always is.
            shares = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
            kept &= jnp.cumsum(shares, axis=-1) - shares < sampling.top_p
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits)


class _Drawing(NamedTuple):
    """Rows in the middle of being written: logits of the next token, and who has ended."""

    logits: Float[Array, "B V"]
    state: ModelState
    ended: Bool[Array, " B"]


def _last_logits(model: LanguageModel, hidden: Float[Array, "B T D"], vocab: int) -> Array:
    """Logits of the next token; table rows beyond the tokenizer's vocabulary are no tokens."""
    logits = constrain(model.logits(hidden[:, -1]), WHOLE)
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)


@partial(jax.jit, static_argnames=("room", "vocab"))
def prefill(
    model: LanguageModel,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    room: int,
    vocab: int,
) -> _Drawing:
    """Reads whole prompts in one pass; `room` tokens fit into caches of full attention."""
    state = model.backbone.empty_state(tokens.shape[0], room)
    hidden, state = model.backbone(tokens, segment_ids=segment_ids, state=state)
    assert state is not None
    ended = jnp.zeros((tokens.shape[0],), bool)
    return _Drawing(_last_logits(model, hidden, vocab), state, ended)


@partial(jax.jit, static_argnames=("count", "sampling", "end", "vocab"))
def draw(
    model: LanguageModel,
    drawing: _Drawing,
    key: PRNGKeyArray,
    *,
    count: int,
    sampling: Sampling,
    end: int,
    vocab: int,
) -> tuple[_Drawing, Int[Array, "B count"]]:
    """Draws `count` tokens a row, one after another; a row that has ended repeats `end`."""

    def body(drawing: _Drawing, key: PRNGKeyArray) -> tuple[_Drawing, Array]:
        token = jnp.where(drawing.ended, end, sample(drawing.logits, key, sampling))
        hidden, state = model.backbone(token[:, None], state=drawing.state)
        assert state is not None
        logits = _last_logits(model, hidden, vocab)
        return _Drawing(logits, state, drawing.ended | (token == end)), token

    drawing, tokens = jax.lax.scan(body, drawing, jax.random.split(key, count))
    return drawing, tokens.T


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows of one length, and their segments."""
    longest = max(map(len, prompts))
    length = -(-longest // _BUCKET) * _BUCKET
    tokens = np.zeros((len(prompts), length), np.int32)
    segment_ids = np.full(tokens.shape, _PADDING, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        segment_ids[row, length - len(prompt) :] = _PROMPT
    return tokens, segment_ids


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  (a frozen value)
    seed: int = 0,
) -> Iterator[list[bytes]]:
    """Goes on from each prompt, until a document ends or `tokens` were drawn.

    Yields, as they come, the next bytes of every row; joined, they are its text in UTF-8.

    Raises:
        UserError: the model has learned positions, and fewer than the text would need.
    """
    ids = [[tokenizer.separator, *tokenizer.encode(prompt).tolist()] for prompt in prompts]
    end = tokenizer.separator
    for drawn in generate_ids(
        model, ids, tokens=tokens, sampling=sampling, end=end, vocab=tokenizer.vocab_size, seed=seed
    ):
        yield [tokenizer.decode_bytes([i for i in row if i != end]) for row in drawn.tolist()]


def generate_ids(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: Sampling,
    end: int,
    vocab: int,
    seed: int = 0,
) -> Iterator[Int[np.ndarray, "B some"]]:
    """`generate` for prompts that are tokens already, at least one each.

    Yields the next tokens of every row; one that has ended repeats `end`. No token of `vocab` or
    above is drawn.

    Raises:
        UserError: as `generate`.
    """
    config = model.backbone.config
    needed = max(map(len, prompts)) + tokens
    if config.position == "learned" and needed > config.max_length:
        raise UserError(
            f"the text would reach {needed} tokens, but the model has {config.max_length} learned "
            f"positions; ask for at most {tokens - needed + config.max_length} tokens"
        )
    rows, segment_ids = _pad_left(prompts)
    room = rows.shape[1] + -(-tokens // _STRIDE) * _STRIDE
    drawing = prefill(model, rows, segment_ids, room=room, vocab=vocab)
    key = jax.random.key(seed)
    for start in range(0, tokens, _STRIDE):
        drawing, drawn = draw(
            model,
            drawing,
            jax.random.fold_in(key, start),
            count=_STRIDE,
            sampling=sampling,
            end=end,
            vocab=vocab,
        )
        yield np.asarray(drawn)[:, : tokens - start]
        if np.asarray(drawing.ended).all():
            return


def continuations(pieces: Iterator[list[bytes]], rows: int) -> list[str]:
    """The texts of `generate`, whole."""
    texts = [b""] * rows
    for piece in pieces:
        texts = [text + more for text, more in zip(texts, piece, strict=True)]
    return [text.decode("utf-8", errors="replace") for text in texts]


def generate_run(
    run_dir: Path,
    prompts: Sequence[str],
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Goes on from prompts with a run's newest checkpoint.

    Yields pieces of the text as they come for one prompt, and whole texts for several.
    """
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        _, tokenizer, model, _ = open_run(run_dir)
    sampling = Sampling(temperature, top_k, top_p)
    pieces = generate(model, tokenizer, prompts, tokens=tokens, sampling=sampling, seed=seed)
    if len(prompts) > 1:
        yield from continuations(pieces, len(prompts))
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield decoder.decode(piece[0])
    yield decoder.decode(b"", final=True)
