"""Attention's kernels for GPUs and TPUs, under Pallas' interpreters; on a GPU, its own natively."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from latte.ops.attention import attention, cudnn, gpu, tpu
from latte.ops.attention.gpu_reach import Side, bounds
from latte.ops.attention.scores import Score, Window
from latte.ops.dispatch import tracing_for
from tests.ops import helpers
from tests.ops.mixers import MIXERS, meaning

ON_GPU = jax.default_backend() == "gpu"

SMALL = gpu.Tiles(gpu.Tile(32, 16, 4, 1), gpu.Tile(16, 16, 4, 1), gpu.Tile(16, 16, 4, 1))
"""Tiles of which even short rows have several, and a window of 100 some that it sees whole."""

FORMS = {
    "gpu": partial(gpu.attention, tiles=SMALL, interpret=not ON_GPU),
    "gpu, its own tiles": partial(gpu.attention, interpret=not ON_GPU),
    "tpu": partial(tpu.attention, blocks=tpu.Blocks(128, 128), interpret=True),
}

TOLERANCE = {"gpu": 5e-4, "tpu": 1e-3}
"""Of gradients on hard logits, whose queries of 128 multiply the rounding of dy · (v − y); splash
also keeps m + log ℓ as one float32, whose step at 1e4 is 1e-3."""

SHARE = 1e-2
"""Of the largest gradient: what errors of gradients are measured against at least (see
test_mixers.py)."""

forms = pytest.mark.parametrize("form", ["gpu", "tpu"])
mixers = pytest.mark.parametrize(
    "mixer", [m for m in MIXERS if m.kind == "attention"], ids=lambda mixer: mixer.name
)


@pytest.fixture(autouse=True)
def implementations(monkeypatch):
    """All forms by name, whatever machine this is."""
    # The package's attribute of that name is the function.
    available = sys.modules["latte.ops.attention"]._FORMS
    for name, form in FORMS.items():
        monkeypatch.setitem(available, name, form)


def check(call, form: str, share: float = SHARE):
    """A check that a form is the definition in float64 on the same float32 inputs.

    `call` maps (inputs, impl) to a tree of arrays; the check takes inputs and how far gradients may
    be off.
    """
    actual = helpers.outputs_and_gradients(lambda inputs: call(inputs, form))
    expected = helpers.outputs_and_gradients(lambda inputs: call(inputs, "reference"))

    def run(inputs, tolerance=1e-4):
        narrow = helpers.to(inputs, jnp.float32)
        with jax.enable_x64(True):
            y, gradients = expected(helpers.to(narrow, jnp.float64))
        y_actual, gradients_actual = actual(narrow)
        helpers.assert_close(y_actual, y, 1e-4)
        floor = share * max(map(helpers.norm, gradients))
        helpers.assert_close(gradients_actual, gradients, tolerance, floor)

    return run


@forms
@mixers
def test_kernels_are_the_definition(form, mixer):
    """On hard logits, documents that end anywhere, and states of any past."""
    rng = np.random.default_rng(0)
    length = 70 if form == "gpu" else 150

    def call(inputs, impl):
        y, state = mixer(**inputs, impl=impl)
        return y, meaning(state)

    compare = check(call, form)
    for kind in ("normal", "normal", "jumps", "ten thousand"):
        ids = helpers.segments(rng, 2, length)
        segment = np.where(rng.random(2) < 0.6, ids[:, 0], rng.integers(-1, 3, 2))
        state = mixer.past(rng, segment, kind=kind) if mixer.carries else None
        arrays = mixer.arrays(rng, 2, length, kind=kind)
        inputs = {"arrays": arrays, "segment_ids": ids, "state": state}
        compare(inputs, 1e-4 if kind == "normal" else TOLERANCE[form])


def make(rng, length: int, heads: int, kv_heads: int, key_size: int, size: int) -> dict:
    return {
        "q": rng.normal(size=(1, length, heads, key_size)),
        "k": rng.normal(size=(1, length, kv_heads, key_size)),
        "v": rng.normal(size=(1, length, kv_heads, size)),
    }


@pytest.mark.parametrize(
    ("form", "key_size", "size"),
    [
        ("gpu", 24, 128),
        ("gpu, its own tiles", 128, 256),
        ("tpu", 24, 256),
    ],
)
def test_heads_of_any_size(form, key_size, size):
    rng = np.random.default_rng(1)
    ids = jnp.asarray(helpers.segments(rng, 1, 150))

    def call(inputs, impl):
        return attention(**inputs, window=40, softcap=20.0, segment_ids=ids, impl=impl)[0]

    check(call, form, 0.0)(make(rng, 150, 4, 2, key_size, size))


@forms
def test_one_token(form):
    def call(inputs, impl):
        return attention(**inputs, impl=impl)[0]

    check(call, form)(make(np.random.default_rng(2), 1, 2, 1, 16, 16))


@forms
def test_bfloat16_is_as_exact_as_xla(form):
    """By a scale that is a power of two: splash rounds what its queries are scaled to.

    XLA multiplies some float32 factors of gradients that matrix units take in bfloat16 only.
    """
    form = {"gpu": "gpu, its own tiles"}.get(form, form)
    inputs = helpers.to(make(np.random.default_rng(3), 256, 4, 2, 96, 96), jnp.bfloat16)

    def run(impl, inputs):
        def call(inputs):
            return attention(**inputs, window=128, scale=0.125, impl=impl)[0]

        y, gradients = helpers.outputs_and_gradients(call)(inputs)
        return y, *gradients

    expected = run("reference", helpers.to(inputs, jnp.float32))
    errors, peers = (
        [helpers.error(a, e) for a, e in zip(run(impl, inputs), expected, strict=True)]
        for impl in (form, "xla")
    )
    for actual, peer in zip(errors, peers, strict=True):
        assert actual <= 1.2 * peer, (errors, peers)


@forms
def test_nothing_leaks(form):
    """No gradient to other documents, to the future, or past the window: exactly zero."""
    length, window, t = 150, 40, 130
    inputs = helpers.to(make(np.random.default_rng(4), length, 2, 1, 16, 16), jnp.float32)
    ids = jnp.asarray(np.digitize(np.arange(length), [1, 70, 120])[None])

    @jax.jit
    def reached(places):
        def some(inputs):
            y, _ = attention(**inputs, window=window, segment_ids=ids, impl=form)
            return jnp.sum(y * places[:, None, None])

        gradients = jax.grad(some)(inputs)
        return {name: (g != 0).any(axis=(0, 2, 3)) for name, g in gradients.items()}

    places = np.arange(length)
    for visible, chosen in (
        ((places >= 120) & (places <= t), places == t),
        ((places >= 69 + 1) & (places < 120), (places >= 110) & (places < 120)),
    ):
        found = reached(jnp.asarray(chosen, jnp.float32))
        assert not found["q"][~chosen].any()
        for name in ("k", "v"):
            assert found[name][chosen].all()
            assert not found[name][~visible].any(), name


@forms
@pytest.mark.parametrize("far", ["a window", "a document"])
def test_what_nothing_reaches_is_not_read(form, far):
    """Whole blocks of NaN: a kernel that read and hid them would spread them."""
    if (form, far) == ("tpu", "a document"):
        pytest.skip("splash finds the blocks that it skips before it sees any document")
    length, starts, nan = 512, 256, 192
    inputs = helpers.to(make(np.random.default_rng(5), length, 2, 1, 16, 16), jnp.float32)
    near = (np.arange(length) >= nan)[:, None, None]
    inputs |= {name: jnp.where(near, inputs[name], jnp.nan) for name in ("k", "v")}
    if far == "a window":
        clean = attention(**inputs, window=17, impl=form)[0][:, starts + 128 :]
    else:
        ids = jnp.asarray(np.arange(length) >= starts, jnp.int32)[None]
        clean = attention(**inputs, window=100, segment_ids=ids, impl=form)[0][:, starts:]
    assert jnp.isfinite(clean).all()


def test_gpu_kernels_visit_what_they_must_and_mask_what_they_must():
    """Of all pairs of blocks, on runs in and out of order: no pair that sees is left out, and none
    that does not is left unmasked. In order, the first and the last block visited are needed."""
    rng = np.random.default_rng(8)
    # Few shapes, each of which compiles.
    for past, length, own, other in 25 * [(7, 50, 8, 4), (0, 33, 4, 16)]:
        limits = (None, 0, 3, 17, 40)
        left, right = (limits[i] for i in rng.integers(0, len(limits), 2))
        ordered = rng.random() < 0.5
        run = rng.integers(0, 3, past + length) if rng.random() < 0.8 else np.zeros(past + length)
        run = (np.sort(run) if ordered else run).astype(np.int32)
        window, at = Window(left, right), np.arange(past + length)
        sees = np.asarray(window.holds(jnp.asarray(at[past:, None]), jnp.asarray(at)))
        sees = sees & (run[past:, None] == run)
        q, k = jnp.asarray(run[None, past:]), jnp.asarray(run[None])
        for pairs, sides, offset, reach in (
            (sees, (q, k), past, window),
            (sees.T, (k, q), -past, Window(right, left)),
        ):
            blocks = Side(sides[0], own), Side(sides[1], other)
            found = np.asarray(bounds(*blocks, offset, reach))[0]
            for i, (first, whole, rest, last) in enumerate(found):
                rows = pairs[i * own : (i + 1) * own]
                assert not rows[:, : first * other].any()
                assert not rows[:, last * other :].any()
                assert rows[:, whole * other : rest * other].all()
                assert rest * other <= pairs.shape[1] or whole == rest
                needed = [rows[:, j * other :][:, :other].any() for j in range(first, last)]
                if ordered and len(needed) > 0 and any(needed):
                    assert len(needed) - sum(needed) <= 2


@forms
def test_no_array_holds_all_pairs_of_tokens(form):
    length = 2048
    inputs = helpers.to(make(np.random.default_rng(6), length, 1, 1, 16, 16), jnp.float32)
    whole = {"gpu": "gpu, its own tiles"}.get(form, form)

    def total(inputs):
        return jnp.sum(attention(**inputs, impl=whole)[0] ** 2)

    assert max(helpers.traced_sizes(jax.value_and_grad(total), inputs)) < length**2


def test_cudnn_is_asked_for_what_it_knows_only():
    """No future, no past, no soft cap, 16 bits; windows of W keys."""
    q, k, v = shapes(2, 64, 0, 4, 2, 64, 64, jnp.bfloat16)[:3]
    plain, past = Score(0.125, None), Window(None, 0)

    def fits(q=q, k=k, v=v, window=past, score=plain):
        return cudnn.fits(*(jnp.zeros(x.shape, x.dtype) for x in (q, k, v)), window, score)

    assert all(fits(window=window) for window in (past, Window(9, 0), Window(None, None)))
    assert not any(fits(window=window) for window in (Window(9, 3), Window(0, None)))
    assert not fits(score=Score(0.125, 30.0))
    assert not fits(*shapes(2, 64, 0, 4, 2, 64, 64, jnp.float32)[:3])
    assert not fits(*shapes(2, 64, 7, 4, 2, 64, 64, jnp.bfloat16)[:3])
    assert not fits(*shapes(2, 64, 0, 4, 2, 64, 128, jnp.bfloat16)[:3])


def test_cudnn_is_chosen_for_whole_rows_on_a_gpu(monkeypatch):
    """Rows with documents or a past go to our kernel, and so do programs for another machine."""
    monkeypatch.setattr(cudnn, "attention", lambda q, *_: q + 1)
    kernels = {"gpu": lambda q, *_: q + 2}
    monkeypatch.setattr(sys.modules["latte.ops.attention"], "_KERNELS", kernels)
    array = jnp.zeros((1, 64, 2, 16), jnp.bfloat16)
    ids = jnp.zeros((1, 64), jnp.int32)

    def chosen(array=array, impl=None, **settings):
        return float(attention(array, array, array, window=9, impl=impl, **settings)[0][0, 0, 0, 0])

    with tracing_for("gpu"):
        assert ON_GPU or chosen() == 2
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen() == chosen(impl="cudnn") == 1
    assert chosen(impl="pallas") == 2
    state = attention(array, array, array, window=9, impl="xla")[1]
    for unfit in (
        {"segment_ids": ids},
        {"state": state},
        {"softcap": 5.0},
        {"array": array.astype(jnp.float32)},
    ):
        assert chosen(**unfit) == 2
        with pytest.raises(ValueError, match="cuDNN takes"):
            chosen(**unfit, impl="cudnn")


@pytest.mark.skipif(not ON_GPU, reason="cuDNN runs on GPUs")
@pytest.mark.parametrize("window", [None, 1, 40, (None, None)], ids=str)
def test_cudnn_is_the_definition(window):
    inputs = helpers.to(make(np.random.default_rng(7), 256, 4, 2, 64, 64), jnp.bfloat16)

    def run(inputs, form):
        reach, score = Window.of(window), Score(0.125, None)
        return helpers.outputs_and_gradients(lambda z: form(z["q"], z["k"], z["v"], reach, score))(
            inputs
        )

    def definition(q, k, v, reach, score):
        return attention(q, k, v, window=tuple(reach), scale=score.scale, impl="reference")[0]

    expected = run(helpers.to(inputs, jnp.float32), definition)
    helpers.assert_close(run(inputs, cudnn.attention), expected, 1e-2, 1e-2)


def shapes(batch, length, past, heads, kv_heads, key_size, size, dtype, **rest):
    """Abstract arguments of a form."""

    def array(*dimensions, dtype=dtype):
        return jax.ShapeDtypeStruct(dimensions, dtype, **rest)

    return (
        array(batch, length, heads, key_size),
        array(batch, length + past, kv_heads, key_size),
        array(batch, length + past, kv_heads, size),
        array(batch, length, dtype=jnp.int32),
        array(batch, length + past, dtype=jnp.int32),
    )


def gradients_of(form, window: Window, score: Score):
    """Compiles y and the gradients of its sum of squares."""

    @jax.jit
    def run(q, k, v, run_q, run_k):
        def total(q, k, v):
            y = form(q, k, v, run_q, run_k, window, score)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    return run


SIZES = [
    # T, past, H, G, K, D
    (1024, 0, 8, 8, 96, 96),
    (8192, 127, 16, 16, 128, 128),
    (8192, 0, 8, 2, 64, 64),
    (1000, 0, 8, 4, 256, 256),
    (130, 7, 4, 1, 16, 128),
]
WINDOWS = [Window(127, 0), Window(None, 0), Window(9, 3)]
CAP = Score(0.125, 30.0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_gpu_kernels_lower_for_cuda(size, dtype):
    run = gradients_of(gpu.attention, WINDOWS[SIZES.index(size) % len(WINDOWS)], CAP)
    text = run.trace(*shapes(2, *size, dtype)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") + text.count("triton_kernel_call_ffi") == 3


def compile_for(monkeypatch, topology: str, size: tuple, dtype, window: Window) -> None:
    device = helpers.tpu(monkeypatch, topology)
    arguments = shapes(1, *size, dtype, sharding=SingleDeviceSharding(device))
    compiled = gradients_of(tpu.attention, window, CAP).lower(*arguments).compile()
    assert (compiled.as_text() or "").count('custom_call_target="tpu_custom_call"') == 3


SLICES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@pytest.mark.parametrize("topology", SLICES)
def test_every_tpu_compiles_the_papers_size(monkeypatch, topology):
    compile_for(monkeypatch, topology, SIZES[0], jnp.bfloat16, WINDOWS[0])


@pytest.mark.slow
@pytest.mark.parametrize("topology", SLICES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_every_tpu_compiles_every_size(monkeypatch, topology, size, window, dtype):
    compile_for(monkeypatch, topology, size, dtype, window)
