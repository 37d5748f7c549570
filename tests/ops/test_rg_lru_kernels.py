"""The kernels of RG-LRU against its definition, interpreted, or native where there is a GPU."""

import importlib
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from latte.ops.rg_lru import gpu, kernel, tpu, xla
from tests.ops import helpers

# `latte.ops.rg_lru` is the function in latte.ops, and the folder in the import system.
definition = importlib.import_module("latte.ops.rg_lru")._recurrence_reference

ON_GPU = jax.default_backend() == "gpu"


def _gpu(programs):
    tiles = gpu.Tiles(width=32, rows=2, steps=4, backward_steps=2, programs=programs)
    return partial(gpu.recurrence, tiles=tiles, interpret=not ON_GPU)


# With small tiles, so that short inputs have several blocks of each kind.
KERNELS = {
    "tpu": partial(tpu.recurrence, tiles=tpu.Tiles(time=32, width=128), interpret=True),
    "gpu": _gpu(programs=1),
    "gpu in parts": _gpu(programs=32),
}

KINDS = ("normal", "zero", "large", "jumps", "mixed")


def make(rng, batch, length, width, kind="normal"):
    """Inputs of a recurrence; some rows go on in the document of their state."""
    shape = (batch, length, width)
    ids = helpers.segments(rng, batch, length)
    before = np.where(rng.random((batch, 1)) < 0.5, ids[:, :1], -1)
    return {
        "x": rng.normal(size=shape),
        "r": helpers.logits(rng, kind, shape),
        "i": helpers.logits(rng, kind, shape),
        "lam": helpers.logits(rng, kind, (width,), axis=0),
        "first": np.diff(ids, axis=1, prepend=before) != 0,
        "h": rng.normal(size=(batch, width)),
    }


def call(recurrence, **options):
    return lambda inputs: recurrence(**inputs, **options)


def check(name, reverse=False):
    """A check in float32 against the definition in float64, outputs and all gradients."""
    actual = helpers.outputs_and_gradients(call(KERNELS[name], reverse=reverse))
    expected = helpers.outputs_and_gradients(call(definition, reverse=reverse))

    def compare(inputs):
        narrow = helpers.to(inputs, jnp.float32)
        with jax.enable_x64(True):
            wide = expected(helpers.to(narrow, jnp.float64))
        helpers.assert_close(actual(narrow), wide, 1e-4)

    return compare


def test_flags_survive_packing():
    flags = np.random.default_rng(0).random((50, 32)) < 0.5
    bits = kernel.pack_bits(jnp.asarray(flags))[:, None]
    np.testing.assert_array_equal(jnp.right_shift(bits, np.arange(32)) & 1, flags)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_the_definition(name, reverse):
    rng = np.random.default_rng(0)
    compare = check(name, reverse)
    for kind in KINDS:
        compare(make(rng, 2, 75, 130, kind))


@pytest.mark.parametrize(
    ("name", "length"), [("tpu", 1), ("tpu", 32), ("gpu", 1), ("gpu in parts", 32)]
)
def test_any_length_and_extreme_gates(name, length):
    rng = np.random.default_rng(length)
    compare = check(name)
    for gate in (-1e4, 1e4):
        for lam in (-1e4, 1e4):
            inputs = make(rng, 1, length, 3)
            r, lam = np.full_like(inputs["r"], gate), np.full_like(inputs["lam"], lam)
            compare(inputs | {"r": r, "lam": lam})
    compare(make(rng, 1, length, 3, "jumps"))


@pytest.mark.parametrize("name", ["tpu", "gpu in parts"])
def test_long_memory(name):
    """a within 1e-6 of 1 over many blocks."""
    rng = np.random.default_rng(2)
    inputs = make(rng, 1, 150, 2) | {"lam": np.array([-16.0, -9.0])}
    check(name)(inputs | {"first": np.zeros((1, 150), bool)})


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_bfloat16_is_no_less_exact_than_the_chunked_form(name, reverse):
    rng = np.random.default_rng(3)
    inputs = make(rng, 2, 90, 64)
    inputs["first"] = rng.random((2, 90)) < 0.02
    narrow = helpers.to(inputs, jnp.bfloat16)
    narrow |= helpers.to({k: inputs[k] for k in ("lam", "h")}, jnp.float32)
    with jax.enable_x64(True):
        wide = helpers.to(narrow, jnp.float64)
        expected = helpers.outputs_and_gradients(call(definition, reverse=reverse))(wide)

    def errors(recurrence):
        actual = helpers.outputs_and_gradients(call(recurrence, reverse=reverse))(narrow)
        leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        return np.array([helpers.error(a, e) for a, e in leaves])

    # The last state is in float32, where the interpreted reciprocal is less exact than hardware's.
    assert (errors(KERNELS[name]) <= np.maximum(1.2 * errors(xla.recurrence), 1e-5)).all()


def races_found(f, *args):
    """Whether TPU's interpreter finds a race; it only prints them."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    pltpu.reset_tpu_interpret_mode_state()
    jax.block_until_ready(f(*args))
    return interpret_pallas_call.races.races_found


def racing(seed=0):
    return pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=2, random_seed=seed, uninitialized_memory="nan"
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_no_races(seed):
    inputs = helpers.to(make(np.random.default_rng(seed), 1, 32, 256), jnp.float32)
    tiles = tpu.Tiles(time=16, width=128)

    def loss(inputs):
        hs, last = tpu.recurrence(**inputs, tiles=tiles, interpret=racing(seed))
        return hs.sum() + last.sum()

    assert not races_found(jax.grad(loss, allow_int=True), inputs)


def test_races_would_be_found():
    """Two cores that add into one block."""

    def body(x, o):
        o[...] = x[...]

    f = pl.pallas_call(
        body,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=racing(),
    )
    assert races_found(f, jnp.ones((32, 128)))


def shapes(batch, length, width, dtype):
    """The arguments of `forward_and_backward`."""
    z = jax.ShapeDtypeStruct((batch, length, width), dtype)
    state = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    lam = jax.ShapeDtypeStruct((width,), jnp.float32)
    return z, z, z, lam, jax.ShapeDtypeStruct((batch, length), bool), state, z, state


def forward_and_backward(recurrence, reverse=False):
    def f(x, r, i, lam, first, h, dhs, dlast):
        def of(x, r, i, lam, h):
            return recurrence(x, r, i, lam, first, h, reverse)

        out, vjp = jax.vjp(of, x, r, i, lam, h)
        return out, vjp((dhs, dlast))

    return f


SLICES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


def compile_for(chip, f, arguments):
    """f's program for one TPU, compiled with none."""
    pytest.importorskip("libtpu")
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    topology = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[chip])
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("one",))
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return jax.jit(f).lower(*arguments).compile().as_text()


@pytest.mark.parametrize(
    ("chip", "shape"),
    [
        *((chip, (4, 8192, 2048, jnp.bfloat16)) for chip in SLICES),
        *(
            pytest.param(chip, shape, marks=pytest.mark.slow)
            for chip in SLICES
            for shape in (
                (4, 8192, 2048, jnp.float32),
                (1, 131072, 1024, jnp.bfloat16),
                (2, 4096, 2560, jnp.bfloat16),
                (3, 1000, 300, jnp.bfloat16),
                (3, 1, 96, jnp.float32),
            )
        ),
    ],
)
def test_compiles_for_tpu(chip, shape):
    for reverse in (False, True):
        text = compile_for(chip, forward_and_backward(tpu.recurrence, reverse), shapes(*shape))
        assert text.count('custom_call_target="tpu_custom_call"') == 2


def test_nothing_is_moved_around_the_kernels_on_tpu():
    arguments = shapes(4, 8192, 2048, jnp.bfloat16)
    text = compile_for("v5e", forward_and_backward(tpu.recurrence), arguments)
    entry = text[text.index("\nENTRY ") :]
    made = re.findall(r"= \w+\[([\d,]*)\]\S* (copy|transpose|pad|reshape|fusion)\(", entry)
    sizes = [np.prod([int(n) for n in dims.split(",") if n]) for dims, _ in made]
    assert sizes
    assert max(sizes) <= 2**18


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (4, 8192, 2048, jnp.bfloat16),
        (1, 8192, 2048, jnp.bfloat16),
        (3, 1000, 300, jnp.float32),
        (2, 1, 96, jnp.bfloat16),
    ],
)
def test_lowers_for_cuda(shape, reverse):
    f = jax.jit(forward_and_backward(gpu.recurrence, reverse))
    text = f.trace(*shapes(*shape)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") in (2, 4)
