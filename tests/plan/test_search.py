"""What a search tries, and that it finds the best of it."""

from dataclasses import replace

import pytest

from latte.config import MeshConfig, TrainConfig
from latte.errors import UserError
from latte.plan import Plan
from latte.plan.chips import parse_topology
from latte.plan.search import candidates, meshes, search
from tests.plan.small import SLICE, needs_compiler, small


def test_meshes_fill_the_slice():
    topology = parse_topology("v5e:16x16", 2)
    found = list(meshes(small(MeshConfig(context=4)), topology))
    assert {mesh.fsdp for mesh in found} == {1, 16, 32, 64}
    for mesh in found:
        assert mesh.data * mesh.fsdp * mesh.context * mesh.tensor == 512
        assert mesh.context == 4
        assert mesh.data % 2 == 0


def test_the_largest_microbatch_comes_first():
    groups = [group for mesh in candidates(small(), parse_topology(SLICE)) for group in mesh]
    assert {group[0].model.remat for group in groups} == {"none", "dots", "full"}
    for group in groups:
        counts = [each.train.accumulate for each in group]
        assert counts == sorted(counts)
        assert counts[0] == 1


def test_rows_that_do_not_spread_are_refused():
    config = replace(small(), train=TrainConfig(batch_size=3, sequence_length=512))
    with pytest.raises(UserError, match="3 rows of a batch do not spread evenly over 4"):
        search(config, parse_topology(SLICE), lambda tried: None)


@needs_compiler
@pytest.mark.slow
def test_the_best_is_the_shortest_that_fits():
    seen: list[Plan] = []
    best = search(small(layers=2), parse_topology(SLICE), seen.append)
    assert len(seen) > 3
    assert best.seconds == min(one.seconds for one in seen if one.memory.fits)
