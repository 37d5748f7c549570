"""Macchiato's TPU kernels: their numbers under Pallas' interpreters, races, and compilation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from latte.ops.dispatch import tracing_for
from latte.ops.macchiato import macchiato, tpu
from latte.ops.macchiato.state import empty_state
from tests.ops import helpers
from tests.ops.mixers import KINDS, Mixer, meaning, run

SHARE = 1e-2
"""As in test_mixers: gradients of logits may be zero but for their rounding."""

TILES = tpu.Tiles(chunk=16, heads=4)


def kernels(tiles=TILES, interpret=True, **settings):
    def op(q, k, v, qw, kw, *, segment_ids, state):
        given = {"segment_ids": segment_ids, "state": state, **settings}
        return tpu.macchiato(q, k, v, qw, kw, **given, tiles=tiles, interpret=interpret)

    return op


def definition(impl="reference", **settings):
    def op(q, k, v, qw, kw, *, segment_ids, state):
        given = {"segment_ids": segment_ids, "state": state, **settings}
        return macchiato(q, k, v, qw, kw, **given, impl=impl)

    return op


def make(rng, batch: int, length: int, window: int, *, heads=2, kv_heads=None, **sizes) -> dict:
    kv_heads = kv_heads or heads
    settings = {"window": window}
    mixer = Mixer("", macchiato, "macchiato", settings, heads=heads, kv_heads=kv_heads)
    ids = helpers.segments(rng, batch, length)
    # Documents end where chunks do, too; the state's document goes on, is another, or is empty.
    ids[0] = np.digitize(np.arange(length), [16, 48])
    segment = np.where(rng.random(batch) < 0.6, ids[:, 0], rng.integers(-1, 3, batch))
    arrays = mixer.arrays(rng, batch, length, **sizes)
    return {"arrays": arrays, "segment_ids": ids, "state": mixer.past(rng, segment, **sizes)}


def comparison(op, tolerance: float = 1e-4, **settings):
    """A check in float32 against the float64 definition, of outputs and every gradient."""
    actual, expected = run(op), run(definition(**settings))

    def check(inputs):
        narrow = helpers.to(inputs, jnp.float32)
        with jax.enable_x64(True):
            y, gradients = expected(helpers.to(narrow, jnp.float64))
        out, actual_gradients = actual(narrow)
        helpers.assert_close(out, y, tolerance)
        floor = SHARE * max(map(helpers.norm, gradients))
        helpers.assert_close(actual_gradients, gradients, tolerance, floor)

    return check


def test_kernels_are_the_definition_on_hard_logits():
    rng = np.random.default_rng(0)
    check = comparison(kernels(window=16), window=16)
    for kind in KINDS:
        for _ in range(2):
            check(make(rng, 2, 70, 16, latents=3, size=5, kind=kind))


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (5, {"softcap": 5.0, "scale": 0.25}),
        pytest.param(17, {}, marks=pytest.mark.slow),
        (40, {"softcap": 5.0}),
    ],
)
def test_kernels_are_the_definition_through_any_window(window, settings):
    """Less than a chunk, one token more, and three chunks; 70 tokens in one document at last."""
    settings = settings | {"window": window}
    check = comparison(kernels(**settings), **settings)
    rng = np.random.default_rng(7)
    for kind in ("normal", "jumps"):
        check(make(rng, 2, 70, window, kind=kind))
    inputs = make(rng, 2, 70, window)
    inputs["segment_ids"][:] = inputs["state"].window.segment[:, None].clip(0)
    check(inputs)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "latents", "size"),
    [
        (2, 1, 2, 2, 3, 2),
        pytest.param(1, 2, 1, 1, 1, 1, marks=pytest.mark.slow),
        (1, 17, 4, 2, 1, 4),
        pytest.param(2, 32, 6, 2, 5, 1, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_the_definition_on_any_shape(batch, length, heads, kv_heads, latents, size):
    rng = np.random.default_rng(8)
    check = comparison(kernels(window=6), window=6)
    sizes = {"heads": heads, "kv_heads": kv_heads, "latents": latents, "size": size}
    check(make(rng, batch, length, 6, **sizes, kind="jumps"))


@pytest.mark.parametrize(
    ("heads", "latents", "size", "most"),
    [
        pytest.param(4, 64, 64, 2, marks=pytest.mark.slow),
        pytest.param(4, 64, 64, 4, marks=pytest.mark.slow),
        pytest.param(2, 128, 40, 2, marks=pytest.mark.slow),
        pytest.param(8, 16, 24, 8, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_the_definition_however_heads_share_lanes(heads, latents, size, most):
    """Two heads in 128 lanes (two steps, two pairs a step), one, eight across lane tiles."""
    tiles = tpu.Tiles(chunk=16, heads=most)
    check = comparison(kernels(window=16, tiles=tiles), window=16)
    rng = np.random.default_rng(1)
    check(make(rng, 1, 20, 16, heads=heads, latents=latents, size=size, kind="jumps"))


def test_nothing_is_read_before_it_is_written():
    """This interpreter fills memory with NaN, and runs what a TPU would run."""
    check = comparison(kernels(window=20, interpret=pltpu.InterpretParams()), window=20)
    rng = np.random.default_rng(2)
    for kind in ("normal", "jumps"):
        check(make(rng, 1, 36, 20, kind=kind))


@pytest.mark.slow
def test_pieces_with_the_state_carried_are_the_whole():
    rng = np.random.default_rng(3)
    kernel = kernels(window=18)
    op = jax.jit(lambda arrays, ids, state: kernel(**arrays, segment_ids=ids, state=state))
    points = [(0, 1), (1, 18), (18, 35), (35, 36), (36, 80)]
    for kind in ("normal", "jumps"):
        inputs = helpers.to(make(rng, 3, 80, 18, kind=kind), jnp.float32)
        arguments = inputs["arrays"], inputs["segment_ids"], inputs["state"]
        y, state = helpers.in_pieces(op, *arguments, points)
        expected, after = op(*arguments)
        helpers.assert_close((y, meaning(state)), (expected, meaning(after)), 1e-5)


def test_nothing_leaks():
    rng = np.random.default_rng(4)
    ids = jnp.asarray([np.digitize(np.arange(40), ends) for ends in ([1, 16, 30], [20])])
    arrays = make(rng, 2, 40, 40, size=2)["arrays"]
    # Latents that jump within the first chunk send it through the recurrence.
    arrays["k"][0, :10] -= 1e4

    def y(arrays):
        return kernels(window=40)(**arrays, segment_ids=ids, state=None)[0]

    helpers.assert_no_leak(y, helpers.to(arrays, jnp.float32), ids, local=("q", "qw"))


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_the_chunked_form():
    """Per output and gradient, against float64 on the same rounded inputs."""
    rng = np.random.default_rng(5)
    inputs = helpers.to(make(rng, 1, 64, 20, latents=16, size=32), jnp.float32)
    arrays = helpers.to(inputs["arrays"], jnp.bfloat16)
    inputs = {"arrays": arrays, "segment_ids": inputs["segment_ids"], "state": None}
    with jax.enable_x64(True):
        exact = run(definition(window=20))(helpers.to(inputs, jnp.float64))

    def errors(op):
        found = zip(jax.tree.leaves(run(op)(inputs)), jax.tree.leaves(exact), strict=True)
        return [helpers.error(*pair) for pair in found]

    kept = errors(kernels(window=20, tiles=tpu.Tiles(chunk=32)))
    other = errors(definition("xla", window=20))
    assert all(a <= 1.1 * b + 1e-6 for a, b in zip(kept, other, strict=True)), (kept, other)
    y, (latents, window) = kernels(window=20)(**arrays, segment_ids=None, state=None)
    assert y.dtype == window.k.dtype == window.v.dtype == jnp.bfloat16
    assert latents.m.dtype == latents.l.dtype == latents.s.dtype == jnp.float32


def shaped(dtype, heads=16, latents=64, size=128, length=256):
    shapes = [latents + 1, latents, *[size] * 3]
    return [jax.ShapeDtypeStruct((1, length, heads, n), dtype) for n in shapes]


def test_what_kernels_cannot_do_is_said():
    def call(arrays, window=128, tiles=None, interpret=False):
        op = kernels(window=window, tiles=tiles or tpu.Tiles(), interpret=interpret)
        jax.eval_shape(lambda *x: op(*x, segment_ids=None, state=None), *arrays)

    with pytest.raises(ValueError, match="multiple of 128"):
        call(shaped(jnp.float32), tiles=tpu.Tiles(chunk=64))
    with pytest.raises(ValueError, match="not float16"):
        call(shaped(jnp.float16))
    with pytest.raises(ValueError, match="fit into VMEM"):
        call(shaped(jnp.bfloat16), window=4096)


def names_of_kernels(*shapes, window, **settings) -> str:
    """The program that is traced for a TPU."""
    with tracing_for("tpu"):
        call = jax.make_jaxpr(lambda *x: macchiato(*x, window=window, **settings)[0])
        return str(call(*shapes))


def test_the_parts_are_taken_where_the_kernels_do_not_fit():
    wide = shaped(jnp.bfloat16)
    assert "macchiato_forward" in names_of_kernels(*wide, window=128)
    for shapes, window in ((wide, 4096), (shaped(jnp.bfloat16, length=1), 128)):
        assert "macchiato_forward" not in names_of_kernels(*shapes, window=window)
    with pytest.raises(ValueError, match="does not take"):
        names_of_kernels(*wide, window=4096, impl="pallas")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_two_cores_do_not_race(seed):
    """That the check finds races is tested in test_latte_tpu."""
    inputs = helpers.to(make(np.random.default_rng(6), 2, 20, 16, kind="jumps"), jnp.float32)
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, random_seed=seed)
    pltpu.reset_tpu_interpret_mode_state()
    jax.block_until_ready(run(kernels(window=16, interpret=params))(inputs))
    assert interpreter.races is not None
    assert not interpreter.races.races_found


SLICES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def compile_for(monkeypatch, topology: str, shape: tuple, dtype, *, carries: bool = True) -> str:
    """Compiles a call on flat arrays and its gradients with TPU's own compiler: its HLO."""
    batch, length, heads, kv_heads, latents, size, window = shape
    device = helpers.tpu(monkeypatch, topology)
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def array(*dimensions, dtype=dtype):
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

    def forward(arrays, ids, state):
        counts = heads, heads, kv_heads, heads, kv_heads
        q, k, v, qw, kw = (
            x.reshape(batch, length, n, -1) for x, n in zip(arrays, counts, strict=True)
        )
        given = {"segment_ids": ids, "state": state}
        y, after = tpu.macchiato(q, k, v, qw, kw, window=window, softcap=30.0, **given)
        return y.reshape(batch, length, -1), after

    def both(arrays, ids, state, dy):
        y, pull, _ = jax.vjp(lambda x: forward(x, ids, state), arrays, has_aux=True)
        return y, pull(dy)

    widths = (
        heads * (latents + 1),
        heads * latents,
        *[n * size for n in (kv_heads, heads, kv_heads)],
    )
    arrays = [array(batch, length, width) for width in widths]
    state = jax.eval_shape(
        lambda k, v: empty_state(k, v, v, window),
        array(batch, length, heads, latents),
        array(batch, length, kv_heads, size),
    )
    state = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), state) if carries else None
    ids, dy = array(batch, length, dtype=jnp.int32), array(batch, length, heads * size)
    return jax.jit(both).lower(arrays, ids, state, dy).compile().as_text() or ""


@pytest.mark.parametrize("topology", SLICES)
def test_every_tpu_compiles_the_papers_size(monkeypatch, topology):
    compile_for(monkeypatch, topology, (1, 512, 8, 8, 64, 128, 128), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("topology", SLICES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1000, 16, 16, 64, 128, 128),
        (1, 512, 16, 16, 16, 128, 100),
        (1, 512, 16, 4, 64, 64, 129),
        (1, 512, 8, 8, 16, 96, 256),
        (2, 300, 3, 3, 24, 40, 128),
        (1, 130, 2, 2, 3, 5, 300),
    ],
)
def test_every_tpu_compiles_every_size(monkeypatch, topology, dtype, shape):
    compile_for(monkeypatch, topology, shape, dtype)


def test_nothing_large_moves_around_the_kernels(monkeypatch):
    """In the compiled program of flat arrays: no copy, transpose or pad of a sequence."""
    shape = (4, 8192, 16, 16, 64, 128, 128)
    text = compile_for(monkeypatch, "v5e:2x2", shape, jnp.bfloat16, carries=False)
    entry = text[text.index("\nENTRY ") :]
    sequence = re.compile(r"\[4,(8192,\d{4}|\d{4},8192)\]")
    for line in entry.splitlines():
        result = line.partition(" = ")[2].partition(" ")[0]
        if sequence.search(result) and "custom-call" not in line:
            assert any(op in line for op in (" parameter(", " bitcast(", "tuple")), line
