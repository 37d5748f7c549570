"""The configs of configs/ on slices: each on its own, and on others."""

import ast
import importlib.util
import re
import resource
from types import ModuleType

import pytest

from latte.config import CONFIGS, Config, apply_overrides, load, validate
from latte.plan import Plan, plan
from latte.plan.chips import Topology, parse_topology
from tests.plan.small import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

LIMIT = 2 * 180
"""CPU seconds of a plan: three minutes on two cores, which other work may share."""


def planned(config: Config, topology: Topology) -> Plan:
    """The plan, which fits and was not too long in the making."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = plan(config, topology)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.memory.fits
    assert found.mfu < 1
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < LIMIT
    return found


def load_benchmark() -> ModuleType:
    """benchmarks/plans.py, which says what the matrix is."""
    spec = importlib.util.spec_from_file_location("plans", CONFIGS.parent / "benchmarks/plans.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_slices() -> dict[str, tuple[str, list[str]]]:
    """Of each config whose docstring has a plan: the slice and the overrides of its command."""
    found = {}
    for path in sorted(CONFIGS.glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        line = re.search(r"^latte plan --config (\w+) --topology (\S+)(.*)$", doc, re.M)
        if line:
            found[line[1]] = line[2], line[3].split()
    return found


OWN = own_slices()
PLANS = load_benchmark()


@pytest.mark.parametrize("name", OWN)
def test_it_fits_its_own_slice(name):
    topology, overrides = OWN[name]
    planned(validate(apply_overrides(load(name), overrides)), parse_topology(topology))


@pytest.mark.parametrize(("name", "where"), PLANS.matrix())
def test_it_compiles_for_every_slice(name, where):
    topology, slices, _ = PLANS.SLICES[where]
    words = PLANS.matrix()[name, where]
    overrides = words[words.index("--train.batch_size") :] if "--train.batch_size" in words else []
    config = validate(apply_overrides(load(name), overrides))
    found = planned(config, parse_topology(topology, slices))
    assert found.prediction is not None
    assert any(one.network for one in found.prediction.traffic) == (slices > 1)


def test_a_global_batch_of_two_million_tokens_fits_256_chips():
    config = load("latte_1b")
    assert config.train.batch_size * config.train.sequence_length == 2**21
    assert config.train.sequence_length == 4096
    planned(config, parse_topology("v5e:16x16"))


def test_a_row_of_a_million_tokens_fits():
    words = "--train.sequence_length 1048576 --train.batch_size 1"
    mesh = "--mesh.data 1 --mesh.fsdp 1 --mesh.context 256"
    config = apply_overrides(load("latte_1b"), f"{words} {mesh}".split())
    planned(validate(config), parse_topology("v5e:16x16"))
