"""Generation against whole sequences, and sampling against its definitions."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.cost import shapes
from latte.data.tokenizer import ByteTokenizer
from latte.errors import UserError
from latte.generate import Sampling, continuations, draw, generate, prefill, sample
from latte.model import LanguageModel
from tests import definitions
from tests.models import MODELS, make

BYTES = ByteTokenizer()
PROMPTS = ("", "the cat sat on", "né")
GREEDY = Sampling(temperature=0)


def padded(name: str) -> LanguageModel:
    """With more rows in the table than there are bytes, as vocabularies are often padded.

    Untied: random parameters, tied, would say each token again and again.
    """
    return make(dataclasses.replace(MODELS[name], vocab_size=264, max_length=64, tied=False))


def texts(model: LanguageModel, prompts: Sequence[str], **settings) -> list[bytes]:
    pieces = list(generate(model, BYTES, prompts, **settings))
    return [b"".join(row) for row in zip(*pieces, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_likeliest_at_every_token_of_the_whole(name):
    """Of each prompt alone, whatever prompts are beside it; three strides of the loop."""
    model = padded(name)
    wide, found = definitions.wide(model), texts(model, PROMPTS, tokens=40, sampling=GREEDY)
    assert len({token for text in found for token in text}) > 5
    for prompt, text in zip(PROMPTS, found, strict=True):
        read = [BYTES.separator, *prompt.encode()]
        drawn = [*text, BYTES.separator][:40]
        logits = definitions.logits(wide, np.array([*read, *drawn]))[len(read) - 1 : -1, :257]
        chosen = logits[np.arange(len(drawn)), drawn]
        np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=1e-4)


@pytest.mark.parametrize("name", ["latte_r_swa", "hybrid"])
def test_the_logits_of_every_step_are_those_of_the_whole(name):
    model, vocab = padded(name), 257
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab, (2, 7)).astype(np.int32)
    # Padding is a document of its own; tokens drawn go on in the last one, whatever its number.
    ids = np.array([[1, 1, 1, 4, 4, 4, 4], [2] * 7], np.int32)
    drawing = prefill(model, prompt, ids, room=20, vocab=vocab)
    rows = [prompt[0, 3:].tolist(), prompt[1].tolist()]
    for step in range(10):
        for row, logits in zip(rows, drawing.logits, strict=True):
            whole = definitions.logits(definitions.wide(model), np.array(row))[-1]
            np.testing.assert_allclose(logits[:vocab], whole[:vocab], atol=1e-3)
            assert np.isneginf(logits[vocab:]).all()
        key = jax.random.key(step)
        drawing, drawn = draw(
            model, drawing, key, count=1, sampling=Sampling(1.0), end=256, vocab=vocab
        )
        rows = [[*row, token] for row, token in zip(rows, drawn[:, 0].tolist(), strict=True)]


def test_a_row_ends_at_the_separator_and_the_others_go_on():
    """Whichever token one row draws is made the separator."""
    model = padded("latte_swa")
    prompt = np.random.default_rng(1).integers(0, 257, (2, 7)).astype(np.int32)
    start = prefill(model, prompt, np.zeros_like(prompt), room=30, vocab=257)
    settings = {"count": 16, "sampling": Sampling(3.0), "vocab": 257}
    key = jax.random.key(1)
    _, free = draw(model, start, key, end=256, **settings)
    free = np.asarray(free)
    at = next(t for t in range(16) if free[0, t] not in free[1] and free[0, t] not in free[0, :t])
    after, drawn = draw(model, start, key, end=int(free[0, at]), **settings)
    np.testing.assert_array_equal(drawn[0, : at + 1], free[0, : at + 1])
    np.testing.assert_array_equal(drawn[0, at:], free[0, at])
    np.testing.assert_array_equal(drawn[1], free[1])
    np.testing.assert_array_equal(after.ended, [True, False])


class Ending(ByteTokenizer):
    """Bytes, of which one is the separator."""

    def __init__(self, separator: int):
        self.separator = separator


def test_generation_stops_when_every_row_has_ended():
    """With a separator that this model soon gives when it has read it."""
    model = padded("latte_conv")
    wide = definitions.wide(model)

    def until_end(separator: int) -> list[int]:
        read = [separator]
        while len(read) < 30 and (len(read) == 1 or read[-1] != separator):
            read.append(int(definitions.logits(wide, np.array(read))[-1, :257].argmax()))
        return read[1:]

    separator = next(s for s in range(256) if 1 < len(until_end(s)) < 29)
    expected = bytes(until_end(separator)[:-1])
    pieces = list(generate(model, Ending(separator), [""], tokens=400, sampling=GREEDY))
    assert len(pieces) == len(expected) // 16 + 1
    assert b"".join(piece[0] for piece in pieces) == expected
    assert continuations(iter(pieces), 1) == [expected.decode(errors="replace")]


# --- cost


def size_of(state) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", MODELS)
def test_a_state_has_no_more_bytes_for_more_room(name):
    """But full attention's cache, which grows by its keys and values."""
    backbone = shapes(MODELS[name]).backbone
    small, large = (
        size_of(jax.eval_shape(lambda b: b.empty_state(3, room), backbone))  # noqa: B023
        for room in (10, 10_000)
    )
    layers = 2 if "attention" in MODELS[name].pattern else 0
    assert large - small == 9990 * layers * 3 * (2 * 16 * 4 + 1)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_leaves_a_state_like_the_one_it_took(name):
    """So one compiled step, of one cost, does for however many tokens."""
    model = shapes(MODELS[name])
    tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def once(model, tokens, key):
        drawing = prefill(model, tokens, jnp.zeros_like(tokens), room=30, vocab=40)
        after, _ = draw(model, drawing, key, count=3, sampling=GREEDY, end=0, vocab=40)
        return model.backbone.empty_state(2, 30), drawing, after

    empty, drawing, after = jax.eval_shape(once, model, tokens, key)
    for one, other in ((drawing, after), (empty, drawing.state)):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)


# --- sampling

LOGITS = np.log([0.3, 0.25, 0.2, 0.15, 0.06, 0.04])


def shares(logits, sampling: Sampling, rows: int = 20_000) -> np.ndarray:
    """How often each token was drawn."""
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits)))
    drawn = sample(many, jax.random.key(0), sampling)
    return np.bincount(np.asarray(drawn), minlength=len(logits)) / rows


def share_of_kept(logits, kept: Sequence[int]) -> np.ndarray:
    weights = np.where(np.isin(np.arange(len(logits)), kept), np.exp(logits), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), range(6)),
        (Sampling(1.0, top_k=1), [0]),
        (Sampling(1.0, top_k=3), range(3)),
        (Sampling(1.0, top_k=100), range(6)),
        (Sampling(1.0, top_p=0.29), [0]),
        (Sampling(1.0, top_p=0.31), range(2)),  # the smallest set that reaches it
        (Sampling(1.0, top_p=0.8), range(4)),
        (Sampling(1.0, top_p=1e-9), [0]),
        (Sampling(1.0, top_k=2, top_p=0.54), [0]),  # of the two, 0 has 6 / 11
        (Sampling(1.0, top_k=2, top_p=0.56), range(2)),
    ],
)
def test_only_the_likeliest_are_drawn_and_as_often_as_they_should(sampling, kept):
    """In whatever order tokens stand."""
    order = np.random.default_rng(2).permutation(6)
    found = shares(LOGITS[order], sampling)[np.argsort(order)]
    expected = share_of_kept(LOGITS, list(kept))
    assert (found[expected == 0] == 0).all()
    np.testing.assert_allclose(found, expected, atol=0.015)


def test_temperature_divides_logits_before_the_likeliest_are_chosen():
    for temperature in (0.5, 2.0):
        found = shares(LOGITS, Sampling(temperature))
        np.testing.assert_allclose(found, share_of_kept(LOGITS / temperature, range(6)), atol=0.015)
    sharp = shares(LOGITS, Sampling(0.1, top_p=0.8))  # 0.3¹⁰ is most of all
    np.testing.assert_array_equal(sharp > 0, [True, False, False, False, False, False])
    assert shares(LOGITS[::-1], Sampling(0)).tolist() == [0, 0, 0, 0, 0, 1]


def test_equally_likely_tokens_stay_or_go_together():
    tied = np.log([0.4, 0.2, 0.2, 0.2])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)):
        np.testing.assert_allclose(shares(tied, sampling), np.exp(tied), atol=0.015)
    np.testing.assert_array_equal(shares(tied, Sampling(1.0, top_p=0.39)), [1, 0, 0, 0])


def test_what_is_no_token_is_never_drawn():
    padded = [*LOGITS, -np.inf, -np.inf]
    for sampling in (Sampling(5.0), Sampling(1.0, top_k=7), Sampling(1.0, top_p=0.9999)):
        found = shares(padded, sampling)
        assert (found[6:] == 0).all()
        assert (found[:6] > 0).all()


def test_a_seed_decides_and_a_longer_text_begins_with_the_shorter():
    model = padded("latte_conv_swa")
    settings = {"prompts": ("ab", "ab"), "sampling": Sampling(2.0)}
    one, same, other = (texts(model, tokens=20, seed=seed, **settings) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert one[0] != one[1]
    longer = texts(model, tokens=40, seed=1, **settings)
    assert all(long.startswith(short) for long, short in zip(longer, one, strict=True))


def test_a_text_longer_than_the_learned_positions_is_refused():
    model = padded("swa")
    with pytest.raises(UserError, match="ask for at most 61 tokens"):
        texts(model, ["ab"], tokens=62)
    assert len(texts(model, ["ab"], tokens=61, sampling=GREEDY)) == 1
