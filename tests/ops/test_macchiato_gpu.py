"""The fused GPU kernels of Macchiato against the definition, as test_latte_gpu.py has Latte's."""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from latte.ops.attention import AttentionState
from latte.ops.dispatch import tracing_for
from latte.ops.latte import LatteState
from latte.ops.macchiato import MacchiatoState, gpu, macchiato
from tests.ops import helpers
from tests.ops.mixers import KINDS, MIXERS, Mixer, meaning
from tests.ops.test_mixers import SHARE

NARROW, WIDE = (m for m in MIXERS if m.kind == "macchiato" and m.carries)
"""A window of 5; a window of 70 with a soft cap, and four heads that share two."""

INTERPRET = jax.default_backend() != "gpu"
SMALL = gpu.Tiles(chunk=16, group=2, chain_ahead=2)
"""Many chunks and groups in a few tokens, and windows of many chunks."""

TOLERANCE = {"normal": 1e-4, "hard": 5e-4}
"""Of gradients: on hard logits, queries of 128 multiply the rounding of dy · (v − y)."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels as they run here: as plain JAX where this is no GPU."""
    package = sys.modules["latte.ops.macchiato"]
    kernel = partial(package._fused, kernel=partial(gpu.macchiato, interpret=INTERPRET))
    monkeypatch.setitem(package._KERNELS, "gpu", kernel)


def with_window(mixer: Mixer, window: int) -> Mixer:
    return dataclasses.replace(mixer, settings=mixer.settings | {"window": window})


def form(mixer: Mixer, impl: str, tiles: gpu.Tiles | None = None):
    def f(inputs):
        if tiles is None:
            y, after = mixer(**inputs, impl=impl)
        else:
            package = sys.modules["latte.ops.macchiato"]
            fused = partial(gpu.macchiato, tiles=tiles, interpret=INTERPRET)
            arrays, ids, state = inputs["arrays"], inputs["segment_ids"], inputs["state"]
            settings = {"scale": None, "softcap": None} | mixer.settings
            y, after = package._fused(
                **arrays, **settings, segment_ids=ids, state=state, kernel=fused
            )
        return y, meaning(after)

    return f


def make(rng, mixer, length, kind="normal", dtype=jnp.float32, **sizes):
    """Documents that end anywhere, in the first row at chunks' ends too, and a state before."""
    ids = helpers.segments(rng, 2, length)
    ids[0] = np.digitize(np.arange(length), [16, 32, 40, 41, 64])
    segment = np.array([ids[0, 0], rng.integers(-1, 2)])
    state = helpers.to(mixer.past(rng, segment, kind=kind, **sizes), jnp.float32)
    # A cache is of the values' type, which kernels round it to.
    window = state.window._replace(k=state.window.k.astype(dtype), v=state.window.v.astype(dtype))
    return {
        "arrays": helpers.to(mixer.arrays(rng, 2, length, kind=kind, **sizes), dtype),
        "segment_ids": jnp.asarray(ids),
        "state": state._replace(window=window),
    }


def float64(f, inputs):
    with jax.enable_x64(True):
        return f(helpers.to(inputs, jnp.float64))


def check(mixer, tiles):
    """A check in float32, against the float64 definition on the same inputs."""
    actual = helpers.outputs_and_gradients(form(mixer, "pallas", tiles))
    definition = helpers.outputs_and_gradients(form(mixer, "reference"))

    def compare(inputs, tolerance="normal"):
        (out, gradients), expected = actual(inputs), float64(definition, inputs)
        helpers.assert_close(out, expected[0], 1e-4)
        floor = SHARE * max(map(helpers.norm, expected[1]))
        helpers.assert_close(gradients, expected[1], TOLERANCE[tolerance], floor)

    return compare


def test_kernels_are_the_definition_on_hard_logits():
    """In most of these chunks a sum underflows, so that latents go token by token."""
    rng = np.random.default_rng(0)
    compare = check(WIDE, SMALL)
    for kind in (*KINDS, "jumps", "normal"):
        compare(make(rng, WIDE, 70, kind), "normal" if kind == "normal" else "hard")


@pytest.mark.parametrize(
    ("length", "window", "chunk", "latents", "size"),
    [
        (17, 1, 32, 5, 24),
        pytest.param(64, 33, 32, 2, 96, marks=pytest.mark.slow),
        pytest.param(2, 5, 32, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_the_definition_on_any_shape(length, window, chunk, latents, size):
    """Windows of one token, one token wider than a chunk, and within it."""
    rng = np.random.default_rng(1)
    mixer = with_window(NARROW, window)
    compare = check(mixer, gpu.Tiles(chunk=chunk, group=1))
    for kind in ("normal", "jumps"):
        tolerance = "normal" if kind == "normal" else "hard"
        compare(make(rng, mixer, length, kind, latents=latents, size=size), tolerance)


def test_pieces_with_the_state_carried_are_the_whole():
    """Also where a piece is one token, which the parts take."""
    rng = np.random.default_rng(2)
    mixer, length = with_window(NARROW, 21), 49
    inputs = make(rng, mixer, length)
    arrays, ids, state = inputs["arrays"], inputs["segment_ids"], inputs["state"]
    op = jax.jit(partial(mixer, impl=None))
    with tracing_for("gpu"):
        whole = op(arrays, ids, state)
        points = [(0, 16), (16, 32), (32, 33), (33, 49)]
        pieces = helpers.in_pieces(op, arrays, ids, state, points)
    helpers.assert_close(pieces[0], whole[0], 1e-5)
    helpers.assert_close(meaning(pieces[1]), meaning(whole[1]), 1e-5)


def test_nothing_leaks():
    """No gradient to other documents or to the future: exactly zero."""
    rng = np.random.default_rng(3)
    length, first, t = 70, 20, 50
    inputs = make(rng, NARROW, length)
    ids = jnp.asarray(np.digitize(np.arange(length), [1, first, 60])[None].repeat(2, 0))
    inputs |= {"segment_ids": ids, "state": None}
    f = form(NARROW, "pallas", SMALL)

    @jax.jit
    def reached(arrays):
        gradients = jax.grad(lambda x: jnp.sum(f(inputs | {"arrays": x})[0][:, t]))(arrays)
        return {name: (g != 0).any(axis=(0, 2, 3)) for name, g in gradients.items()}

    found, at = reached(inputs["arrays"]), np.arange(length)
    for name, places in found.items():
        start = {"k": first, "v": first, "kw": t - 4}.get(name, t)
        np.testing.assert_array_equal(places, (at >= start) & (at <= t), err_msg=name)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_the_definition_as_the_chunked_form():
    rng = np.random.default_rng(4)
    mixer = with_window(NARROW, 70)
    forms = [
        form(mixer, "reference"),
        form(mixer, "pallas", gpu.Tiles(group=2)),
        form(mixer, "xla"),
    ]
    definition, *narrow = map(helpers.outputs_and_gradients, forms)
    errors = []
    for _ in range(2):
        inputs = make(rng, mixer, 80, dtype=jnp.bfloat16, latents=20, size=24)
        expected = float64(definition, inputs)
        floor = SHARE * max(map(helpers.norm, expected[1]))
        measured = []
        for f in narrow:
            (y, _), gradients = f(inputs)
            pairs = zip([y, *gradients], [expected[0][0], *expected[1]], strict=True)
            measured.append(
                [helpers.error(a, e, floor * (i > 0)) for i, (a, e) in enumerate(pairs)]
            )
        errors.append(measured)
    kernels, chunked = np.sqrt(np.mean(np.square(errors), axis=0))
    share = np.full(len(chunked), 1.2)
    # The gradient of an initial l is a difference of sums over s, which is kept in bfloat16.
    share[-4] = 1.6
    assert (kernels <= np.maximum(share * chunked, 1e-6)).all(), (kernels, chunked)


def shapes(batch, length, heads, kv_heads, latents, key_size, size, window, dtype, *, past):
    """Abstract arrays, segment ids and state."""

    def array(*dimensions, dtype=dtype):
        return jax.ShapeDtypeStruct((batch, *dimensions), dtype)

    wide, state = partial(array, dtype=jnp.float32), None
    ids = array(length, dtype=jnp.int32)
    if past:
        sums, segment = wide(heads, latents), array(dtype=jnp.int32)
        cache = [array(window - 1, kv_heads, n) for n in (key_size, size)]
        seen = array(window - 1, dtype=jnp.bool_)
        latent = LatteState(sums, sums, wide(heads, latents, size), segment)
        state = MacchiatoState(latent, AttentionState(*cache, seen, segment))
    arrays = {
        "q": array(length, heads, latents + 1),
        "k": array(length, heads, latents),
        "v": array(length, kv_heads, size),
        "qw": array(length, heads, key_size),
        "kw": array(length, kv_heads, key_size),
    }
    return arrays, ids, state


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("past", "sizes"),
    [
        (False, (4, 8192, 16, 16, 64, 128, 128, 128)),
        (True, (2, 4100, 8, 2, 16, 64, 96, 1000)),
    ],
)
def test_kernels_lower_for_cuda(monkeypatch, past, sizes, dtype):
    package = sys.modules["latte.ops.macchiato"]
    native = partial(package._fused, kernel=gpu.macchiato)
    monkeypatch.setitem(package._KERNELS, "gpu", native)

    def total(arrays, latents, ids, state):
        if state is not None:
            state = state._replace(latents=latents)
        y, after = macchiato(**arrays, window=sizes[-1], softcap=30.0, segment_ids=ids, state=state)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(after.latents.s)

    arrays, ids, state = shapes(*sizes, dtype, past=past)
    latents = None if state is None else state.latents
    gradient = jax.value_and_grad(total, (0, 1), allow_int=True)
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(h200), tracing_for("gpu"):
        for f, kernels in ((total, 5), (gradient, 10 + past)):
            traced = jax.jit(f).trace(arrays, latents, ids, state)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("custom_call @__gpu$xla.gpu.triton") == kernels


def test_the_kernel_takes_what_it_fits():
    """Nothing else: float64 and single tokens go to the parts, and by name to nobody."""
    rng = np.random.default_rng(5)
    inputs = make(rng, NARROW, 20) | {"state": None}
    single = jax.tree.map(lambda x: x[:, :1], inputs)

    def kernels(inputs, impl=None):
        with tracing_for("gpu"):
            return str(jax.make_jaxpr(lambda x: NARROW(**x, impl=impl)[0])(inputs))

    assert "macchiato_outputs" in kernels(inputs)
    assert "macchiato_outputs" in kernels(inputs, "pallas")
    assert "pallas_call" not in kernels(inputs, "xla")
    assert "pallas_call" not in kernels(single)
    with pytest.raises(ValueError, match="does not take"):
        kernels(single, "pallas")
