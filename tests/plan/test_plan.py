"""Steps compiled for slices that are not there."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from latte.cli import main
from latte.config import MeshConfig, load
from latte.errors import UserError
from latte.mesh import make_mesh
from latte.plan import plan
from latte.plan.build import (
    NO_TPU,
    arguments_of,
    compile_apart,
    devices_of,
    memory_of,
    total_of,
    trace_step,
)
from latte.plan.chips import parse_topology
from latte.plan.report import misfit
from latte.plan.residuals import INPUT, saved_bytes
from tests.plan.small import SLICE, as_overrides, needs_compiler, small, unrolled


@pytest.fixture(scope="module")
def found():
    return plan(small(), parse_topology(SLICE))


@needs_compiler
def test_the_memory_is_the_compilers(found, monkeypatch):
    """Against the same step, compiled in this process."""
    for name, value in NO_TPU.items():
        monkeypatch.setenv(name, value)
    config = small()
    mesh = make_mesh(config.mesh, devices_of(parse_topology(SLICE)))
    compiled = trace_step(config, *arguments_of(config, mesh), mesh).lower().compile()
    stats = compiled.memory_analysis()
    assert found.memory.total == total_of(memory_of(compiled))
    assert found.memory.total == (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )
    parts = found.memory.parameters + found.memory.optimizer + found.memory.remainder
    assert parts + sum(found.memory.saved.values()) == found.memory.total


@needs_compiler
@pytest.mark.slow
def test_a_scanned_model_has_the_products_of_the_unrolled_one():
    """Without recomputation, which stops at a block's last product in one, at the stack's in the
    other."""
    config = small(remat="none")
    scanned, apart = (plan(one, parse_topology(SLICE)) for one in (config, unrolled(config)))
    assert scanned.prediction is not None
    assert apart.prediction is not None
    assert scanned.prediction.flops == apart.prediction.flops
    assert scanned.flops == apart.flops


@needs_compiler
def test_a_plan_has_every_kernel_and_a_bound_below_the_peak(found):
    assert found.prediction is not None
    latte = {"macchiato_forward", "macchiato_backward", "latte_states"}
    assert latte | {"rg_lru"} <= set(found.prediction.kernels)
    assert all(seconds > 0 for seconds in found.prediction.kernels.values())
    assert 0 < found.mfu < 1
    assert {axis for one in found.prediction.traffic for axis in one.axes} == {"fsdp"}


@needs_compiler
@pytest.mark.slow
def test_copies_on_other_slices_share_their_gradients_over_the_network():
    """Each of the four chips of a slice sends its quarter of them once, as two slices must."""
    found = plan(small(MeshConfig(data=2, fsdp=4)), parse_topology(SLICE, 2))
    assert found.prediction is not None
    [sent] = [one for one in found.prediction.traffic if one.network]
    assert (sent.kind, sent.axes) == ("all-reduce", ("data",))
    # Some gradients are rounded to bfloat16 on the way; norms are whole on every chip.
    assert 0.9 < sent.bytes / (4 * found.parameters / 4) < 1.05
    assert found.prediction.time.network > 0


def latte(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "latte", *arguments], capture_output=True, text=True
    )


@needs_compiler
def test_a_config_that_does_not_fit_says_by_how_much_and_what_would():
    config = small(vocab_size=6_000_000)
    words = as_overrides(config, load("latte_tiny"))
    done = latte("plan", "--config", "latte_tiny", "--topology", SLICE, "--json", *words)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "does not fit v5e:2x2: a device needs" in done.stderr
    assert "GiB too little; " in done.stderr
    said = json.loads(done.stdout)
    assert said["fits"] is False
    assert said["memory"]["total"] > said["memory"]["room"] > 15 * 2**30
    assert said["mend"] in done.stderr


@needs_compiler
@pytest.mark.slow
def test_what_the_compiler_takes_can_still_be_too_much():
    topology = parse_topology(SLICE)
    tight = replace(topology.chip, reserved=topology.chip.memory - 2**23)
    found = plan(small(), replace(topology, chip=tight))
    assert not found.memory.fits
    assert "0.01 GiB, " in misfit(found)
    assert found.mend


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--topology v9:2x2", "there is no TPU 'v9'"),
        ("", "--topology is missing"),
        (f"--topology {SLICE} --mesh.fsdp 3", "does not fill the 4 devices of v5e:2x2"),
        (f"--topology {SLICE} --slices 2 --mesh.data 4", "the 8 devices of 2 × v5e:2x2"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_compiled(capsys, arguments, words):
    status = main(["plan", "--config", "latte_tiny", *arguments.split()])
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert words in said.err


@needs_compiler
def test_a_slice_that_libtpu_does_not_know(capsys):
    assert main(["plan", "--config", "latte_tiny", "--topology", "v5e:3x5"]) == 2
    said = capsys.readouterr().err
    assert "libtpu has no slice v5e:3x5" in said
    assert said.count("\n") == 1


def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "jax\[tpu\]"'):
        compile_apart(small(), parse_topology(SLICE), Path(tmp_path))


@pytest.mark.skipif(jax.device_count() < 4, reason="too few devices")
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_what_layers_save_has_a_name(remat):
    """A block's input alone, or its products too: of each of 3 layers, for two rows a device."""
    config = small(MeshConfig(fsdp=4), remat=remat)
    mesh = make_mesh(config.mesh, jax.devices()[:4])
    traced = trace_step(config, *arguments_of(config, mesh), mesh)
    saved = saved_bytes(traced.jaxpr, 3, 4, 1)
    of_a_channel = 3 * 2 * 512 * 2  # layers, rows, tokens, bytes
    assert saved[INPUT] == of_a_channel * 256
    assert set(saved) == ({INPUT} if remat == "full" else {INPUT, "product"})
