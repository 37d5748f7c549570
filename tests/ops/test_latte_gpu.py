"""Latte's GPU kernels against the definition: interpreted on a CPU, as they are on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from latte.ops.latte import gpu
from latte.ops.latte.state import LatteState
from latte.ops.segments import Runs, number_runs
from tests.ops import helpers
from tests.ops.mixers import KINDS, MIXERS, meaning
from tests.ops.test_mixers import SHARE

MIXER = MIXERS[0]
INTERPRET = jax.default_backend() != "gpu"
SMALL = gpu.Tiles(chunk=16, group=2, chain_ahead=2)
"""Many chunks and groups in a few tokens, and a rest of the chain that no step of it divides."""


def kernel(tiles):
    def f(inputs):
        arrays, state = inputs["arrays"], inputs["state"]
        runs = number_runs(inputs["segment_ids"], state.segment, arrays["q"].shape[1])
        y, after = gpu.latte(
            *(arrays[x] for x in "qkv"), runs, state, tiles=tiles, interpret=INTERPRET
        )
        return y, meaning(after)

    return f


def form(impl):
    def f(inputs):
        y, after = MIXER(**inputs, impl=impl)
        return y, meaning(after)

    return f


def make(rng, length, kind="normal", dtype=jnp.float32, **sizes):
    """Documents that end anywhere, in the first row at chunks' ends too, and a state before."""
    ids = helpers.segments(rng, 2, length)
    ids[0] = np.digitize(np.arange(length), [16, 32, 40, 41, 64])
    state = MIXER.past(rng, np.array([ids[0, 0], rng.integers(-1, 2)]), kind=kind, **sizes)
    arrays = MIXER.arrays(rng, 2, length, kind=kind, **sizes)
    return {
        "arrays": helpers.to(arrays, dtype),
        "segment_ids": jnp.asarray(ids),
        "state": helpers.to(state, jnp.float32),
    }


def float64(f, inputs):
    with jax.enable_x64(True):
        return f(helpers.to(inputs, jnp.float64))


def check(tiles):
    """A check in float32, against the float64 definition on the same inputs."""
    actual = helpers.outputs_and_gradients(kernel(tiles))
    definition = helpers.outputs_and_gradients(form("reference"))

    def compare(inputs):
        (out, gradients), expected = actual(inputs), float64(definition, inputs)
        helpers.assert_close(out, expected[0], 1e-4)
        floor = SHARE * max(map(helpers.norm, expected[1]))
        helpers.assert_close(gradients, expected[1], 1e-4, floor)

    return compare


def test_kernels_are_the_definition_on_hard_logits():
    """In most of these chunks a sum underflows, so that tokens go one by one."""
    rng = np.random.default_rng(0)
    compare = check(SMALL)
    for kind in (*KINDS, "jumps", "normal"):
        compare(make(rng, 70, kind, latents=3, size=3))


@pytest.mark.parametrize(("length", "latents", "size"), [(1, 1, 1), (17, 5, 24), (64, 2, 96)])
def test_kernels_are_the_definition_on_any_shape(length, latents, size):
    rng = np.random.default_rng(1)
    compare = check(gpu.Tiles(chunk=32, group=1))
    for kind in ("normal", "jumps"):
        compare(make(rng, length, kind, latents=latents, size=size))


def test_equal_logits_do_not_drift():
    """Without a gradient, that is through a forward pass that keeps no states."""
    rng = np.random.default_rng(2)
    run = jax.jit(kernel(gpu.Tiles()))
    for kind in ("zero", "ten thousand", "jumps"):
        inputs = make(rng, 2000, kind, latents=2, size=2)
        expected = float64(form("reference"), inputs)
        helpers.assert_close(run(inputs), expected, 1e-5)


def test_bfloat16_is_as_near_to_the_definition_as_the_chunked_form():
    rng = np.random.default_rng(4)
    forms = [form("reference"), kernel(gpu.Tiles(group=2)), form("xla")]
    definition, *narrow = map(helpers.outputs_and_gradients, forms)
    errors = []
    for _ in range(2):
        inputs = make(rng, 130, dtype=jnp.bfloat16, latents=20, size=24)
        expected = float64(definition, inputs)
        floor = SHARE * max(map(helpers.norm, expected[1]))
        measured = []
        for f in narrow:
            (out, gradients), (out_expected, gradients_expected) = f(inputs), expected
            pairs = zip(jax.tree.leaves(out)[:3], jax.tree.leaves(out_expected), strict=False)
            outputs = [helpers.error(a, e) for a, e in pairs]
            pairs = zip(gradients, gradients_expected, strict=True)
            measured.append(outputs + [helpers.error(a, e, floor) for a, e in pairs])
        errors.append(measured)
    kernels, chunked = np.sqrt(np.mean(np.square(errors), axis=0))
    share = np.full(len(chunked), 1.2)
    # The gradient of an initial l is a difference of sums over s, which is kept in bfloat16.
    share[-2] = 1.6
    assert (kernels <= np.maximum(share * chunked, 1e-6)).all(), (kernels, chunked)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "latents", "size"), [(2, 4100, 8, 16, 96), (4, 8192, 16, 64, 128)]
)
def test_kernels_lower_for_cuda(batch, length, heads, latents, size, dtype):
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def total(q, k, v, run, m, l, s, segment):
        runs = Runs(run, run == 0, segment)
        y, after = gpu.latte(q, k, v, runs, LatteState(m, l, s, segment))
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(after.s)

    logits = array(batch, length, heads, latents)
    sums = array(batch, heads, latents, dtype=jnp.float32)
    inputs = [logits, logits, array(batch, length, heads, size)]
    inputs += [array(batch, length, dtype=jnp.int32), sums, sums]
    inputs += [array(batch, heads, latents, size, dtype=jnp.float32), array(batch, dtype=jnp.int32)]
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with use_abstract_mesh(h200):
        for f, kernels in ((total, 4), (jax.value_and_grad(total, (0, 1, 2)), 9)):
            text = jax.jit(f).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("custom_call @__gpu$xla.gpu.triton") == kernels
