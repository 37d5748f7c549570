"""A step on any mesh of devices is the step on one."""

from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import numpy as np
import pytest

from latte.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig, validate
from latte.data.batch import cut_batch
from latte.errors import UserError
from latte.mesh import check_rows, make_mesh, put_rows, rows_here, shardings
from latte.train import initial_state, train_step

DEVICES, STEPS = 8, 20
PATTERNS = {
    "hybrid": ("latte_r_swa", "attention"),
    "conv": ("latte_conv_swa", "latte"),
    "r_swa": ("r_swa", "swa"),
}
MESHES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(fsdp=8),
    "context": MeshConfig(data=2, context=4),
    "tensor": MeshConfig(data=4, tensor=2),
    "mixed": MeshConfig(fsdp=2, context=2, tensor=2),
}

pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason="too few devices")


def config_of(pattern: str, mesh: MeshConfig, **train) -> Config:
    model = ModelConfig(
        vocab_size=64,
        width=32,
        layers=2,
        pattern=PATTERNS[pattern],
        heads=4,
        kv_heads=2,
        latents=4,
        window=8,
        ff=64,
        dtype="float32",
    )
    shape = {"steps": STEPS, "batch_size": 8, "sequence_length": 64, **train}
    optim = OptimConfig(lr=3e-3, warmup=2)
    return validate(Config("mesh", model=model, optim=optim, train=TrainConfig(**shape), mesh=mesh))


def losses(config: Config, devices: int) -> np.ndarray:
    """Of every step of a short run, on the first devices."""
    rng, train = np.random.default_rng(0), config.train
    found = []
    with jax.set_mesh(make_mesh(config.mesh, jax.devices()[:devices])):
        layout = shardings(eqx.filter_eval_shape(initial_state, config))
        state = jax.jit(partial(initial_state, config), out_shardings=layout)()
        step = jax.jit(partial(train_step, config), out_shardings=(layout, None))
        for _ in range(train.steps):
            rows = rng.integers(1, 64, (train.batch_size, 65), dtype=np.int32)
            rows[rng.random(rows.shape) < 0.05] = 0
            state, report = step(state, put_rows(cut_batch(rows, 0), train.batch_size))
            found.append(float(report.loss))
    return np.asarray(found)


@pytest.fixture(scope="module")
def of_one_device():
    found = {}

    def get(pattern: str) -> np.ndarray:
        if pattern not in found:
            found[pattern] = losses(config_of(pattern, MeshConfig()), 1)
        return found[pattern]

    return get


def check(of_one_device, pattern: str, mesh: str) -> None:
    spread = losses(config_of(pattern, MESHES[mesh]), DEVICES)
    np.testing.assert_allclose(spread, of_one_device(pattern), rtol=0, atol=1e-5)


def test_losses_are_those_of_one_device(of_one_device):
    check(of_one_device, "hybrid", "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_losses_are_those_of_one_device_for_every_mixer(of_one_device, pattern, mesh):
    check(of_one_device, pattern, mesh)


@pytest.mark.slow
def test_microbatches_are_shared_evenly():
    one = losses(config_of("hybrid", MeshConfig(), steps=3), 1)
    config = config_of("hybrid", MeshConfig(data=2, fsdp=2), steps=3, accumulate=2)
    np.testing.assert_allclose(losses(config, 4), one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mesh", ["fsdp", "context", "mixed"])
def test_parameters_and_moments_are_spread(mesh):
    config = config_of("hybrid", MESHES[mesh])
    with jax.set_mesh(make_mesh(config.mesh)):
        shapes = eqx.filter_eval_shape(initial_state, config)
        layout = jax.tree.leaves(shardings(shapes))
    leaves = jax.tree.leaves(shapes)
    held = sum(
        np.prod(spec.shard_shape(leaf.shape), dtype=int)
        for leaf, spec in zip(leaves, layout, strict=True)
    )
    shares = config.mesh.fsdp * config.mesh.context * config.mesh.tensor
    # Norms are whole on every device.
    assert held < 1.1 * sum(leaf.size for leaf in leaves) / shares


def test_a_process_reads_the_rows_of_its_devices():
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=4))):
        np.testing.assert_array_equal(rows_here(16), np.arange(16))
        batch = put_rows({"x": np.arange(32).reshape(16, 2)}, 16)
        np.testing.assert_array_equal(batch["x"], np.arange(32).reshape(16, 2))


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (MeshConfig(fsdp=3), "does not fill 8 devices"),
        (MeshConfig(data=2, fsdp=2), "does not fill 8 devices"),
    ],
)
def test_devices_must_fill_the_mesh(mesh, words):
    with pytest.raises(UserError, match=words):
        make_mesh(mesh)


def test_rows_must_spread_evenly():
    with pytest.raises(UserError, match="12 rows of a microbatch do not spread evenly over 8"):
        check_rows(make_mesh(MeshConfig(fsdp=4)), 12)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (MeshConfig(tensor=3), "does not divide model.heads"),
        (MeshConfig(tensor=4), "does not divide model.kv_heads"),
        (MeshConfig(context=3), "does not divide train.sequence_length"),
        (MeshConfig(context=16), "fewer than the 7 that a layer reaches back"),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(mesh, words):
    with pytest.raises(UserError, match=words):
        validate(replace(config_of("hybrid", MeshConfig()), mesh=mesh))
