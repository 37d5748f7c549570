"""What the time model says of programs whose time is known: the figures in its docstring."""

import json
import os
import subprocess
import sys

import pytest

from latte.plan.build import NO_TPU
from tests.plan.small import needs_compiler

MEASURE = """
import json, os, sys
from pathlib import Path
from latte.plan.schedule import Schedules, dump_flags
folder, slice_name = Path(sys.argv[1]), sys.argv[2]
os.environ["LIBTPU_INIT_ARGS"] = dump_flags(folder)
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from latte.plan.build import devices_of
from latte.plan.chips import parse_topology
from latte.plan.predict import costs
from latte.plan.program import Program
topology = parse_topology(slice_name)
one = SingleDeviceSharding(devices_of(topology)[0])
def measure(function, dtype):
    x = jax.ShapeDtypeStruct((8192, 8192), dtype, sharding=one)
    program = Program(jax.jit(function).lower(x, x).compile().as_text())
    visit = next(program.visits())
    cost = max(costs(program, visit, topology.chip, Schedules(folder)), key=lambda c: c.seconds)
    return {"seconds": cost.seconds, "issue": cost.issue.cycles / topology.chip.clock}
print(json.dumps([measure(jnp.matmul, jnp.bfloat16), measure(jnp.add, jnp.float32)]))
"""


@needs_compiler
@pytest.mark.parametrize(
    ("name", "peak", "bandwidth", "issue"),
    [
        ("v5e:2x2", 197e12, 0.819e12, 0.83),
        pytest.param("v5p:2x2x1", 459e12, 2.765e12, 0.97, marks=pytest.mark.slow),
        pytest.param("v6e:2x2", 918e12, 1.64e12, 1.27, marks=pytest.mark.slow),
    ],
)
def test_a_product_runs_at_the_peak_and_an_addition_at_the_bandwidth(
    tmp_path, name, peak, bandwidth, issue
):
    command = [sys.executable, "-c", MEASURE, str(tmp_path), name]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | NO_TPU
    )
    product, addition = json.loads(done.stdout.splitlines()[-1])
    at_the_peak = 2 * 8192**3 / peak
    assert product["issue"] / at_the_peak == pytest.approx(issue, abs=0.02)
    assert product["seconds"] == pytest.approx(max(1.0, issue) * at_the_peak, rel=0.02)
    assert addition["seconds"] == pytest.approx(3 * 4 * 8192**2 / bandwidth)
    assert addition["issue"] < 0.15 * addition["seconds"]
