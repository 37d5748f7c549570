"""The language model and the classifier over every mixer and every choice of a config."""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.config import ModelConfig
from latte.cost import shapes
from latte.layers import Place
from latte.model import Classifier, LanguageModel, dropout
from tests import definitions
from tests.models import MODELS, SMALL, make
from tests.ops import helpers

LENGTH, PIECE = 20, 5
ENDS = ([5, 6, 13], [10])
"""Where the rows' documents end: at pieces' boundaries, after one token, within a piece."""
IDS = np.stack([np.digitize(np.arange(LENGTH), ends) for ends in ENDS]).astype(np.int32)
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, IDS.shape).astype(np.int32)

every_model = pytest.mark.parametrize("name", MODELS)
QUICK = ("latte_r_swa", "latte_conv", "hybrid of three")
"""Models that stand for all where each takes half a minute; the others are slow tests."""


def defined_logits(model: LanguageModel, tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Each document alone, block after block."""
    logits = partial(definitions.logits, definitions.wide(model))
    return definitions.each_document(logits, tokens, ids)


@jax.jit
def run(model: LanguageModel, tokens: Any, segment_ids: Any, state: Any):
    return model(tokens, segment_ids=segment_ids, state=state)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_packed_rows_their_pieces_and_their_tokens_are_each_document_alone(name):
    model = make(MODELS[name])
    expected = defined_logits(model, TOKENS, IDS)
    call, empty = partial(run, model), model.backbone.empty_state(len(IDS), LENGTH)
    for size in (LENGTH, PIECE, 1):
        points = [(t, t + size) for t in range(0, LENGTH, size)]
        logits, state = helpers.in_pieces(call, TOKENS, IDS, empty, points)
        assert logits.dtype == jnp.float32
        assert helpers.error(logits, expected) < 3e-5, size
        np.testing.assert_array_equal(state.segment, IDS[:, -1])
        np.testing.assert_array_equal(state.position, definitions.positions(IDS)[:, -1])


ENCODERS = {
    f"{name}, both directions": dataclasses.replace(MODELS[name], causal=False)
    for name in ("attention", "swa", "latte_r_swa", "hybrid of three")
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_reads_each_document_both_ways(name):
    model = make(ENCODERS[name])
    logits, _ = run(model, TOKENS, IDS, None)
    assert helpers.error(logits, defined_logits(model, TOKENS, IDS)) < 3e-5


@pytest.mark.parametrize("name", [*MODELS, *ENCODERS])
def test_nothing_leaks_from_embedding_to_logits(name):
    """Every token of the rows has an embedding of its own, which is what is differentiated."""
    config = (MODELS | ENCODERS)[name]
    model = make(config)
    tokens = jnp.arange(IDS.size, dtype=jnp.int32).reshape(IDS.shape)
    assert IDS.size == config.vocab_size

    def logits(arrays):
        table = arrays["embedding"].reshape(-1, config.width)
        backbone = eqx.tree_at(lambda b: b.embedding.weight, model.backbone, table)
        return model.logits(backbone(tokens, segment_ids=jnp.asarray(IDS))[0])

    embedding = model.backbone.embedding.weight.reshape(*IDS.shape, -1)
    helpers.assert_no_leak(logits, {"embedding": embedding}, IDS, causal=config.causal)


@partial(jax.jit, static_argnames="z_loss")
def loss_of(model: LanguageModel, weights: Any, **settings: Any):
    targets = jnp.roll(jnp.asarray(TOKENS), -1, axis=1)
    return model.loss(jnp.asarray(TOKENS), targets, jnp.asarray(IDS), weights, **settings)


@pytest.mark.parametrize("name", ["hybrid", "swa"])
def test_the_loss_is_the_cross_entropy_of_the_logits(name):
    """Of a tied and of an untied model; with the z-loss and weights."""
    model = make(MODELS[name])
    weights = np.random.default_rng(1).random(IDS.shape).astype(np.float32)
    sums = loss_of(model, jnp.asarray(weights), z_loss=0.1)
    logits = defined_logits(model, TOKENS, IDS)
    log_normaliser = np.log(np.exp(logits).sum(axis=-1))
    targets = np.roll(TOKENS, -1, axis=1)
    nll = log_normaliser - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(sums.nll, (weights * nll).sum(), rtol=1e-5)
    expected = (weights * (nll + 0.1 * log_normaliser**2)).sum()
    np.testing.assert_allclose(sums.loss, expected, rtol=1e-5)


def test_what_is_kept_for_the_backward_pass_changes_no_gradient():
    """And each choice keeps less than the one before: more products are computed again."""
    results, products = [], []
    for remat in ("none", "dots", "full"):
        model = make(dataclasses.replace(MODELS["latte"], remat=remat))
        step = jax.value_and_grad(lambda model: loss_of(model, jnp.ones(IDS.shape)).loss)
        results.append(jax.tree.leaves(jax.jit(step)(model)))
        products.append(str(jax.make_jaxpr(step)(model)).count("dot_general"))
    for other in results[1:]:
        helpers.assert_close(other, results[0], 1e-5)
    assert products[0] < products[1] < products[2]


def test_blocks_that_are_compiled_one_by_one_have_the_same_gradients():
    looped, unrolled = (
        jax.jit(jax.value_and_grad(lambda model: loss_of(model, jnp.ones(IDS.shape)).loss))(
            make(dataclasses.replace(MODELS["latte"], remat="dots", unroll=unroll))
        )
        for unroll in (False, True)
    )
    helpers.assert_close(jax.tree.leaves(unrolled), jax.tree.leaves(looped), 1e-5)


def test_depth_adds_no_computation_to_compile():
    equations = [
        str(jax.make_jaxpr(run)(shapes(config), TOKENS, IDS, None)).count(" = ")
        for config in (dataclasses.replace(SMALL, layers=layers) for layers in (2, 6))
    ]
    assert equations[0] == equations[1]


# --- latents


@jax.jit
def latents_of(model: LanguageModel):
    return model.backbone.latents(jnp.asarray(TOKENS), jnp.asarray(IDS))


def test_latents_are_a_distribution_of_every_layer_in_order():
    """None where a layer has none; the window's state is one more."""
    model = make(MODELS["hybrid of three"])
    conv, swa, macchiato = latents_of(model)
    assert swa is None
    assert (conv.shape[-2:], macchiato.shape[-2:]) == ((2, 4), (2, 5))
    for p in (conv, macchiato):
        assert p.shape[:2] == IDS.shape
        assert float(p.min()) >= 0
        np.testing.assert_allclose(p.sum(axis=-1), 1, atol=1e-6)
    repeated = latents_of(make(MODELS["hybrid"]))
    assert [p is None for p in repeated] == [False, True, False, True]


@pytest.mark.parametrize("name", ["latte_r_swa", "hybrid", "hybrid of three"])
def test_latents_of_every_layer_are_the_definition(name):
    model = make(MODELS[name])
    wide = definitions.wide(model.backbone)
    for layer, p in enumerate(latents_of(model)):
        if p is None:
            continue
        block = definitions.block_of(wide, layer)

        def states(tokens):
            x = definitions.stream(wide, tokens, layer)  # noqa: B023
            return definitions.states(block.mixer, definitions.norm(block.mixer_norm, x))  # noqa: B023

        assert helpers.error(p, definitions.each_document(states, TOKENS, IDS)) < 3e-5, layer


# --- dropout, tables


def test_dropout_keeps_the_mean_and_is_nothing_without_a_key():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(50, 50, 40)) + 3, jnp.bfloat16)
    assert dropout(x, 0.3, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x
    y = dropout(x, 0.3, jax.random.key(0))
    assert y.dtype == x.dtype
    kept = np.asarray(y != 0)
    assert abs(kept.mean() - 0.7) < 0.005
    np.testing.assert_allclose(y[kept], x[kept] / 0.7, rtol=1e-2)
    assert abs(float(y.astype(jnp.float32).mean()) - 3) < 0.03


def test_dropout_of_the_loss_is_on_with_a_key_only():
    model = make(dataclasses.replace(MODELS["latte"], dropout=0.5))
    keys = (None, None, *jax.random.split(jax.random.key(0)))
    losses = [float(loss_of(model, jnp.ones(IDS.shape), key=key).loss) for key in keys]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_dropout_is_drawn_anew_in_every_layer():
    """Of two blocks that add the same c, dropout keeps neither, one or both: 0, 2c or 4c."""
    config = dataclasses.replace(MODELS["latte"], dropout=0.5, width=256)
    stack = make(config).backbone.stack
    [block] = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), stack.blocks)
    block = eqx.tree_at(
        lambda b: (b.mixer.project_out.weight, b.mlp_norm.scale, b.mlp_norm.bias),
        block,
        replace_fn=jnp.zeros_like,
    )
    block = eqx.tree_at(lambda b: b.mlp_norm.bias, block, replace_fn=jnp.ones_like)
    stack = eqx.tree_at(lambda s: s.blocks, stack, (block,))
    x, place = jnp.zeros((*IDS.shape, 256)), Place(jnp.asarray(IDS), jnp.asarray(IDS))
    c = stack(x, place)[0] / 2
    times = np.round(stack(x, place, key=jax.random.key(1))[0] / c, 2)
    values, counts = np.unique(times, return_counts=True)
    np.testing.assert_array_equal(values, [0, 2, 4])
    np.testing.assert_allclose(counts / counts.sum(), [0.25, 0.5, 0.25], atol=0.02)


def test_a_tied_model_has_one_table():
    tied, untied = make(MODELS["latte"]), make(MODELS["swa"])
    assert tied.head is None
    assert tied.table is tied.backbone.embedding.weight
    assert untied.head is not None
    np.testing.assert_array_equal(untied.table, untied.head.weight.T)
    assert not np.array_equal(untied.table, untied.backbone.embedding.weight)


def test_a_new_model_knows_nothing():
    """Its loss is that of even odds, or hardly above it."""
    model = LanguageModel(
        dataclasses.replace(MODELS["latte"], vocab_size=500), key=jax.random.key(0)
    )
    loss = loss_of(model, jnp.ones(IDS.shape)).loss / IDS.size
    assert abs(float(loss) - np.log(500)) < 0.1


# --- the classifier


ENCODER = dataclasses.replace(MODELS["latte_r_swa"], causal=False, dropout=0.5)


def classify(tokens: np.ndarray, lengths: list[int], config: ModelConfig = ENCODER, key=None):
    weights = (np.arange(tokens.shape[1]) < np.array(lengths)[:, None]).astype(np.float32)
    model = Classifier(config, 3, key=jax.random.key(0))
    return np.asarray(eqx.filter_jit(model)(tokens, weights, key=key)), model


def test_padding_changes_nothing():
    padded, model = classify(TOKENS, [12, 7])
    assert padded.shape == (2, 3)
    other = np.where(np.arange(LENGTH) < np.array([[12], [7]]), TOKENS, TOKENS[:, ::-1])
    np.testing.assert_allclose(classify(other, [12, 7])[0], padded, atol=1e-6)
    wide = definitions.wide(model)
    for row, length in enumerate((12, 7)):
        hidden = definitions.hidden(wide.backbone, TOKENS[row, :length])
        expected = hidden.mean(axis=0) @ wide.head.weight
        np.testing.assert_allclose(padded[row], expected, atol=1e-4)


def test_a_classifier_drops_out_with_a_key_only():
    keys = jax.random.split(jax.random.key(1))
    one, other = (classify(TOKENS, [12, 7], key=key)[0] for key in keys)
    plain = classify(TOKENS, [12, 7])[0]
    assert np.array_equal(plain, classify(TOKENS, [12, 7])[0])
    assert not np.allclose(one, other)
    assert not np.allclose(one, plain)


def test_rows_without_a_token_are_finite():
    assert np.isfinite(classify(TOKENS, [0, 7])[0]).all()
