"""One contract for every token mixer that a pattern can name, and each small layer's definition."""

import functools
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from latte.config import Mixer as MixerName
from latte.config import ModelConfig
from latte.layers import (
    GLU,
    GeluMLP,
    LayerNorm,
    Mixer,
    Place,
    RMSNorm,
    make_mlp,
    make_norm,
    rotate,
    sinusoids,
)
from latte.layers.linear import BlockLinear, Linear
from latte.model import make_mixer
from tests import definitions
from tests.ops import helpers
from tests.ops.mixers import meaning

WIDTH, LENGTH, PIECE, THETA = 16, 24, 8, 100.0
ENDS = ([8, 9, 16], [3, 20], [])
"""Where the rows' documents end: at a piece's boundary, after one token, within pieces, nowhere."""
IDS = np.stack([np.digitize(np.arange(LENGTH), ends) % 2 for ends in ENDS]).astype(np.int32)


class Case(NamedTuple):
    """A mixer, and what a config says of it."""

    name: MixerName
    position: str = "none"
    kv_heads: int = 2
    causal: bool = True

    def __str__(self) -> str:
        heads = "grouped heads" if self.kv_heads == 1 else "own heads"
        direction = "causal" if self.causal else "both directions"
        return f"{self.name}, {self.position}, {heads}, {direction}"

    @property
    def tolerance(self) -> float:
        """Angles of rotations are float32 whatever the inputs are."""
        return 1e-11 if self.position == "none" else 1e-5

    def make(self) -> Mixer:
        config = ModelConfig(
            width=WIDTH,
            layers=1,
            heads=2,
            kv_heads=self.kv_heads,
            latents=4,
            window=4,
            position=self.position,
            rope_theta=THETA,
            causal=self.causal,
        )
        return make_mixer(self.name, config, key=jax.random.key(0))


NAMES: tuple[MixerName, ...] = get_args(MixerName)
CAUSAL = tuple(
    [Case(name, "vapor") for name in NAMES]
    + [Case(name) for name in ("attention", "latte", "latte_conv", "latte_r_swa")]
    + [Case(name, "rope", 1) for name in ("attention", "r_swa", "latte_swa")]
)
"""vapor is rope for windows and full attention, and turns the values of Latte without a window."""
BOTH = tuple(Case(name, "vapor", causal=False) for name in NAMES)


def cases(*which: Case):
    return pytest.mark.parametrize("case", which, ids=str)


def call(layer: Mixer):
    """(arrays, segment ids, state) → (y, state), compiled."""

    @jax.jit
    def run(arrays: dict, segment_ids: Any, state: Any):
        return layer(arrays["x"], Place(segment_ids, arrays["positions"]), state)

    return run


def one_at_a_time(layer: Mixer):
    """As `call`, of one token."""

    @jax.jit
    def run(arrays: dict, segment_ids: Any, state: Any):
        y, state = layer.step(arrays["x"][:, 0], Place(segment_ids, arrays["positions"]), state)
        return y[:, None], state

    return run


def rows(dtype=jnp.float64) -> dict:
    x = np.random.default_rng(1).normal(size=(len(IDS), LENGTH, WIDTH))
    return {"x": jnp.asarray(x, dtype), "positions": jnp.asarray(definitions.positions(IDS))}


def defined(layer: Mixer, x) -> np.ndarray:
    mix = functools.partial(definitions.mixer, definitions.wide(layer))
    return definitions.each_document(mix, np.asarray(x, np.float64), IDS)


def readable(state: Any) -> Any:
    source, op = state
    return source, meaning(op)


@cases(*CAUSAL)
def test_one_pass_is_the_definition_and_so_are_pieces_and_tokens(case, x64):
    layer, arrays = case.make(), rows()
    run, empty = call(layer), helpers.to(layer.empty_state(len(IDS), LENGTH), jnp.float64)
    y, after = run(arrays, IDS, empty)
    assert helpers.error(y, defined(layer, arrays["x"])) < case.tolerance
    points = [(t, t + PIECE) for t in range(0, LENGTH, PIECE)]
    pieces = helpers.in_pieces(run, arrays, IDS, empty, points)
    tokens = helpers.in_pieces(
        one_at_a_time(layer), arrays, IDS, empty, [(t, t + 1) for t in range(LENGTH)]
    )
    for other, state in (pieces, tokens):
        helpers.assert_close((other, readable(state)), (y, readable(after)), 1e-11)


@cases(*BOTH)
def test_both_directions_are_the_definition_without_a_state(case, x64):
    layer, arrays = case.make(), rows()
    y, after = call(layer)(arrays, IDS, None)
    assert after is None
    assert helpers.error(y, defined(layer, arrays["x"])) < case.tolerance


@cases(*CAUSAL, *BOTH)
def test_nothing_leaks(case):
    layer, arrays = case.make(), rows(jnp.float32)
    place = Place(jnp.asarray(IDS), arrays["positions"])
    helpers.assert_no_leak(
        lambda z: layer(z["x"], place)[0], {"x": arrays["x"]}, IDS, causal=case.causal
    )


@cases(*[Case(name, "vapor") for name in NAMES])
def test_bfloat16_gives_bfloat16_and_keeps_wide_states(case):
    layer, arrays = case.make(), rows(jnp.bfloat16)
    y, state = call(layer)(arrays, IDS, layer.empty_state(len(IDS), LENGTH))
    assert y.dtype == jnp.bfloat16
    wide = {"m", "l", "s", "h"}  # sums; caches hold the activations themselves
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if path[-1].name in wide:
            assert leaf.dtype == jnp.float32, path
    assert helpers.error(y, defined(layer, arrays["x"])) < 0.03


@pytest.mark.parametrize("name", NAMES)
def test_a_state_has_one_structure_shape_and_type(name):
    """What a call returns can go into the same compiled call again, however often."""
    layer, arrays = Case(name, "rope").make(), rows(jnp.float32)
    empty = layer.empty_state(len(IDS), 5)
    _, after = jax.eval_shape(call(layer), arrays, IDS, empty)
    assert jax.tree.structure(after) == jax.tree.structure(empty)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(empty), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("latte")])
def test_latents_are_the_softmax_of_the_definition(name, x64):
    layer, arrays = Case(name, "vapor").make(), rows()
    p = layer.latents(arrays["x"], Place(jnp.asarray(IDS), arrays["positions"]))
    assert p.shape == (len(IDS), LENGTH, 2, 4 + name.endswith("swa"))
    states = functools.partial(definitions.states, definitions.wide(layer))
    expected = definitions.each_document(states, np.asarray(arrays["x"]), IDS)
    assert helpers.error(p, expected) < 1e-6


# --- positions


def test_products_of_rotated_vectors_depend_on_distance_alone(x64):
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(np.broadcast_to(rng.normal(size=6), (1, 9, 1, 6))) for _ in "qk")
    places = jnp.asarray([[0, 1, 2, 3, 5, 8, 13, 100, 1000]])
    products = [
        np.einsum("bthd,bshd->ts", rotate(q, places + shift, THETA), rotate(k, places, THETA))
        for shift in (0, 3)
    ]
    near, far = products[0][3, 0], products[0][5, 4]  # both three apart
    np.testing.assert_allclose(near, far, atol=1e-5)
    np.testing.assert_allclose(np.diag(products[1]), near, atol=1e-3)
    assert np.ptp(products[0][:, 0]) > 0.1


def test_a_rotation_turns_pairs_and_back_undoes_it(x64):
    x = np.random.default_rng(3).normal(size=(2, 5, 3, 8))
    places = np.random.default_rng(4).integers(0, 50, (2, 5)).astype(np.int32)
    y = rotate(jnp.asarray(x), jnp.asarray(places), THETA)
    assert helpers.error(y, definitions.turned(x, places[:, :, None], THETA)) < 1e-5
    back = rotate(y, jnp.asarray(places), THETA, back=True)
    assert helpers.error(back, x) < 1e-6


def test_sinusoids_are_sines_then_cosines():
    places = jnp.arange(50)[None]
    expected = definitions.sinusoids(50, 8, THETA)[None]
    np.testing.assert_allclose(sinusoids(places, 8, THETA), expected, atol=1e-5)


# --- norms, MLPs and projections


def draw(layer: Any) -> Any:
    """A layer with random parameters, so that scales of 1 and biases of 0 cannot hide."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), layer)


@pytest.mark.parametrize(("kind", "which"), [("rms", RMSNorm), ("layer", LayerNorm)])
def test_norms_are_their_definitions(kind, which, x64):
    x = np.random.default_rng(6).normal(size=(2, 3, WIDTH)) * 5 + 1
    norm = draw(make_norm(kind, WIDTH))
    assert isinstance(norm, which)
    assert helpers.error(norm(jnp.asarray(x)), definitions.norm(definitions.wide(norm), x)) < 1e-12


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_start_at_scale_one_and_compute_in_float32(kind):
    """So that only the output is rounded to bfloat16."""
    x = jnp.asarray(np.random.default_rng(7).normal(size=(4, 512)) * 100, jnp.bfloat16)
    y = make_norm(kind, 512)(x)
    assert y.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    if kind == "layer":
        wide = wide - wide.mean(axis=-1, keepdims=True)
    rounded = jnp.asarray(definitions.rms_norm(wide, 1.0), jnp.float32).astype(jnp.bfloat16)
    assert np.mean(y != rounded) < 0.01


@pytest.mark.parametrize(("kind", "which"), [("gelu", GeluMLP), ("glu", GLU)])
def test_mlps_are_their_definitions(kind, which, x64):
    x = np.random.default_rng(8).normal(size=(2, 3, WIDTH))
    mlp = make_mlp(kind, WIDTH, 24, gain_out=1.0, key=jax.random.key(1))
    assert isinstance(mlp, which)
    assert helpers.error(mlp(jnp.asarray(x)), definitions.mlp(definitions.wide(mlp), x)) < 1e-12


def test_a_block_linear_mixes_each_group_within_itself(x64):
    layer = draw(BlockLinear(WIDTH, 4, key=jax.random.key(2)))
    x = np.random.default_rng(9).normal(size=(2, 3, WIDTH))
    dense = np.zeros((WIDTH, WIDTH))
    for group, weight in enumerate(layer.weight):
        at = slice(4 * group, 4 * group + 4)
        dense[at, at] = weight
    assert helpers.error(layer(jnp.asarray(x)), x @ dense + layer.bias) < 1e-12


def test_projections_start_at_their_gain_and_have_wide_gradients():
    layer = Linear(256, 300, key=jax.random.key(3), gain=0.5)
    assert abs(float(layer.weight.std()) * 256**0.5 - 0.5) < 0.01
    x = jnp.asarray(np.random.default_rng(10).normal(size=(4, 256)), jnp.bfloat16)
    gradient = jax.grad(lambda layer: jnp.sum(layer(x).astype(jnp.float32)))(layer).weight
    assert gradient.dtype == jnp.float32
    expected = np.asarray(x, np.float64).sum(axis=0)[:, None] * np.ones((1, 300))
    assert helpers.error(gradient, expected) < 1e-6
