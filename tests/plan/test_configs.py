"""The configs of configs/ on slices: each on its own, and on others."""

import ast
import re

import pytest

from latte.config import CONFIGS, apply_overrides, load, validate
from latte.plan import plan
from latte.plan.chips import parse_topology
from tests.plan.small import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

SLICES = {"v5e-256": ("v5e:16x16", 1), "v5p-128": ("v5p:4x4x8", 1), "v6e-256": ("v6e:16x16", 1)}
TWO = {"2 × v5e-256": ("v5e:16x16", 2)}
LIMIT = 180
"""Seconds of a compilation on two cores."""


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


@pytest.mark.parametrize("name", OWN)
def test_it_fits_its_own_slice(name):
    topology, overrides = OWN[name]
    config = validate(apply_overrides(load(name), overrides))
    found = plan(config, parse_topology(topology))
    assert found.memory.fits
    assert found.compile_seconds < LIMIT


@pytest.mark.parametrize("where", [*SLICES, *TWO])
@pytest.mark.parametrize("name", OWN)
def test_it_compiles_for_every_slice(name, where):
    """With rows enough for each device, and the parameters over a side of the torus."""
    topology = parse_topology(*(SLICES | TWO)[where])
    rows = str(2 * topology.devices)
    config = apply_overrides(load(name), ["--train.batch_size", rows, "--model.remat", "full"])
    sides = ["--mesh.data", "0", "--mesh.fsdp", "16" if "v5p" not in where else "8"]
    found = plan(validate(apply_overrides(config, sides)), topology)
    assert found.memory.fits
    assert found.compile_seconds < LIMIT


def test_a_global_batch_of_two_million_tokens_fits_256_chips():
    config = load("latte_1b")
    assert config.train.batch_size * config.train.sequence_length == 2**21
    assert config.train.sequence_length == 4096
    assert plan(config, parse_topology("v5e:16x16")).memory.fits


def test_a_row_of_a_million_tokens_fits():
    words = "--train.sequence_length 1048576 --train.batch_size 1"
    mesh = "--mesh.data 1 --mesh.fsdp 1 --mesh.context 256"
    config = apply_overrides(load("latte_1b"), f"{words} {mesh}".split())
    assert plan(validate(config), parse_topology("v5e:16x16")).memory.fits
