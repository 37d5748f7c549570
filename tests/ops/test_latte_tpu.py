"""Latte's TPU kernels: their numbers under Pallas' interpreters, races, and that they compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from latte.ops.latte import empty_state, latte, tpu
from latte.ops.segments import number_runs
from tests.ops import helpers
from tests.ops.mixers import KINDS, Mixer, meaning, run

SHARE = 1e-2
"""As in test_mixers: gradients of logits may be zero but for their rounding."""

TILES = tpu.Tiles(chunk=16, heads=4)


def kernels(q, k, v, *, segment_ids, state, tiles=TILES, interpret=True, **_):
    runs = number_runs(segment_ids, state.segment, q.shape[1])
    return tpu.latte(q, k, v, runs, state, tiles=tiles, interpret=interpret)


MIXER = Mixer("latte", kernels, "latte")


def make(rng, batch: int, length: int, *, heads: int = 2, **sizes) -> dict:
    mixer = Mixer("latte", kernels, "latte", heads=heads, kv_heads=heads)
    ids = helpers.segments(rng, batch, length)
    # Documents end where chunks do, too; the state's document goes on, is another, or is empty.
    ids[0] = np.digitize(np.arange(length), [16, 48])
    segment = np.where(rng.random(batch) < 0.6, ids[:, 0], rng.integers(-1, 3, batch))
    arrays = mixer.arrays(rng, batch, length, **sizes)
    return {"arrays": arrays, "segment_ids": ids, "state": mixer.past(rng, segment, **sizes)}


def reference(q, k, v, *, segment_ids, state):
    return latte(q, k, v, segment_ids=segment_ids, state=state, impl="reference")


def comparison(op=kernels, tolerance: float = 1e-4):
    """A check in float32 against the float64 definition, of outputs and every gradient."""
    actual, expected = run(op), run(reference)

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
    check = comparison()
    for kind in KINDS:
        for _ in range(2):
            check(make(rng, 2, 70, latents=3, size=5, kind=kind))


@pytest.mark.parametrize(
    ("batch", "length", "heads", "latents", "size"),
    [(2, 1, 2, 3, 2), (1, 2, 1, 1, 1), (1, 17, 3, 1, 4), (2, 32, 2, 5, 1)],
)
def test_kernels_are_the_definition_on_any_shape(batch, length, heads, latents, size):
    rng = np.random.default_rng(7)
    check = comparison()
    for kind in ("normal", "jumps"):
        check(make(rng, batch, length, heads=heads, latents=latents, size=size, kind=kind))


@pytest.mark.parametrize(
    ("heads", "latents", "size", "most"),
    [(8, 64, 64, 4), (1, 128, 40, 8), (8, 16, 24, 8)],
)
def test_kernels_are_the_definition_however_heads_share_lanes(heads, latents, size, most):
    """Two heads in 128 lanes (two pairs a step, two steps), one, eight across lane tiles."""

    def op(q, k, v, **rest):
        return kernels(q, k, v, **rest, tiles=tpu.Tiles(chunk=16, heads=most))

    rng = np.random.default_rng(1)
    check = comparison(op)
    for kind in ("normal", "jumps"):
        check(make(rng, 1, 20, heads=heads, latents=latents, size=size, kind=kind))


def test_nothing_is_read_before_it_is_written():
    """This interpreter fills memory with NaN, and runs what a TPU would run."""

    def op(q, k, v, **rest):
        return kernels(q, k, v, **rest, interpret=pltpu.InterpretParams())

    check = comparison(op)
    rng = np.random.default_rng(2)
    for kind in ("normal", "jumps"):
        check(make(rng, 2, 40, kind=kind))


def test_pieces_with_the_state_carried_are_the_whole():
    rng = np.random.default_rng(3)
    op = jax.jit(lambda arrays, ids, state: kernels(**arrays, segment_ids=ids, state=state))
    points = [(0, 1), (1, 18), (18, 35), (35, 36), (36, 80)]
    for kind in ("normal", "jumps"):
        inputs = helpers.to(make(rng, 3, 80, kind=kind), jnp.float32)
        arguments = inputs["arrays"], inputs["segment_ids"], inputs["state"]
        y, state = helpers.in_pieces(op, *arguments, points)
        expected, after = op(*arguments)
        helpers.assert_close((y, meaning(state)), (expected, meaning(after)), 1e-5)


def test_nothing_leaks():
    rng = np.random.default_rng(4)
    ids = jnp.asarray([np.digitize(np.arange(40), ends) for ends in ([1, 16, 30], [20])])
    arrays = MIXER.arrays(rng, 2, 40, size=2)
    # Latents that jump within the first chunk send it through the recurrence.
    arrays["k"][0, :10] -= 1e4

    def y(arrays):
        return kernels(**arrays, segment_ids=ids, state=empty_state(2, 2, 3, 2))[0]

    helpers.assert_no_leak(y, helpers.to(arrays, jnp.float32), ids, local=("q",))


def test_bfloat16_is_as_exact_as_the_chunked_form():
    """Per output and gradient, against float64 on the same rounded inputs."""

    def chunked(q, k, v, *, segment_ids, state):
        return latte(q, k, v, segment_ids=segment_ids, state=state, impl="xla")

    rng = np.random.default_rng(5)
    inputs = helpers.to(make(rng, 1, 128, latents=16, size=32), jnp.float32)
    arrays = helpers.to(inputs["arrays"], jnp.bfloat16)
    inputs["state"] = empty_state(1, 2, 16, 32)
    with jax.enable_x64(True):
        exact = jax.tree.leaves(
            run(reference)(helpers.to(inputs | {"arrays": arrays}, jnp.float64))
        )

    def wide(q, k, v, **rest):
        return kernels(q, k, v, **rest, tiles=tpu.Tiles(chunk=64, heads=2))

    kept, other = (
        [helpers.error(x, y) for x, y in zip(jax.tree.leaves(out), exact, strict=True)]
        for out in (run(op)(inputs | {"arrays": arrays}) for op in (wide, chunked))
    )
    assert all(a <= 1.1 * b + 1e-6 for a, b in zip(kept, other, strict=True)), (kept, other)
    out, state = jax.jit(kernels)(**arrays, segment_ids=None, state=inputs["state"])
    assert out.dtype == jnp.bfloat16
    assert state.m.dtype == state.l.dtype == state.s.dtype == jnp.float32


def test_what_kernels_cannot_do_is_said():
    state = empty_state(1, 1, 2, 2)

    def call(dtype, tiles, interpret):
        x = jnp.zeros((1, 4, 1, 2), dtype)
        return kernels(x, x, x, segment_ids=None, state=state, tiles=tiles, interpret=interpret)

    with pytest.raises(ValueError, match="multiple of 128"):
        call(jnp.float32, tpu.Tiles(chunk=64), False)
    with pytest.raises(ValueError, match="not float16"):
        call(jnp.float16, tpu.Tiles(), False)
    x, one = jnp.zeros((1, 4, 1, 1)), empty_state(1, 1, 1, 1)
    with pytest.raises(ValueError, match="one latent"):
        kernels(x, x, x, segment_ids=None, state=one, tiles=tpu.Tiles(), interpret=False)


def test_heads_that_do_not_fit_are_refused():
    wide, narrow, state = jnp.zeros((1, 4, 10, 256)), jnp.zeros((1, 4, 10, 16)), (1, 10, 16, 256)
    given = {"segment_ids": None, "state": empty_state(*state), "tiles": tpu.Tiles()}
    with pytest.raises(ValueError, match="do not fit into VMEM"):
        kernels(narrow, narrow, wide, **given, interpret=False)


def races_found(f, *args) -> bool:
    pltpu.reset_tpu_interpret_mode_state()
    jax.block_until_ready(f(*args))
    assert interpreter.races is not None
    return interpreter.races.races_found


def racing(seed: int) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, random_seed=seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_cores_do_not_race(seed):
    inputs = helpers.to(make(np.random.default_rng(6), 2, 20, kind="jumps"), jnp.float32)

    def op(q, k, v, **rest):
        return kernels(q, k, v, **rest, interpret=racing(seed))

    assert not races_found(run(op), inputs)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_race_is_found(seed):
    """Both cores add to one block."""

    def add(x, out):
        out[...] += x[...]

    block = pl.BlockSpec((8, 128), lambda i: (0, 0))
    call = pl.pallas_call(
        add,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=racing(seed),
    )
    assert races_found(call, jnp.ones((16, 128)))


SLICES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def compile_for(monkeypatch, topology: str, shape: tuple, dtype, *, gradients: bool) -> str:
    """Compiles a call on flat arrays with TPU's own compiler, and returns its HLO."""
    batch, length, heads, latents, size = shape
    device = helpers.tpu(monkeypatch, topology)
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def array(*dimensions, dtype=dtype):
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

    def forward(q, k, v, ids):
        q, k, v = (x.reshape(batch, length, heads, -1) for x in (q, k, v))
        state = empty_state(batch, heads, latents, size)
        runs = number_runs(ids, state.segment, length)
        return tpu.latte(q, k, v, runs, state)[0].reshape(batch, length, -1)

    def backward(q, k, v, ids, dy):
        y, transpose = jax.vjp(lambda *x: forward(*x, ids), q, k, v)
        return y, transpose(dy)

    narrow, wide = (array(batch, length, heads * n) for n in (latents, size))
    arguments = [narrow, narrow, wide, array(batch, length, dtype=jnp.int32)]
    if gradients:
        return jax.jit(backward).lower(*arguments, wide).compile().as_text() or ""
    return jax.jit(forward).lower(*arguments).compile().as_text() or ""


@pytest.mark.parametrize("topology", SLICES)
def test_every_tpu_compiles_the_papers_size(monkeypatch, topology):
    compile_for(monkeypatch, topology, (1, 1024, 8, 16, 96), jnp.bfloat16, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("topology", SLICES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1024, 8, 16, 96),
        (1, 1000, 16, 64, 128),
        (1, 512, 16, 64, 64),
        (1, 512, 8, 128, 256),
        (1, 1024, 4, 128, 128),
        (2, 300, 3, 24, 40),
        (1, 256, 4, 256, 256),
        (1, 130, 2, 3, 5),
    ],
)
def test_every_tpu_compiles_every_size(monkeypatch, topology, dtype, gradients, shape):
    compile_for(monkeypatch, topology, shape, dtype, gradients=gradients)


def test_nothing_large_moves_around_the_kernels(monkeypatch):
    """In the compiled program of flat arrays: no copy, transpose or pad of a sequence."""
    shape = (4, 1024, 4, 64, 128)
    text = compile_for(monkeypatch, "v5e:2x2", shape, jnp.bfloat16, gradients=True)
    entry = text[text.index("\nENTRY ") :]
    for line in entry.splitlines():
        of_sequences = "[4,1024," in line.partition(" = ")[2].partition("(")[0]
        if of_sequences and "custom-call" not in line:
            assert any(op in line for op in (" parameter(", " bitcast(", "get-tuple")), line
