"""Slices are named as libtpu names them."""

import pytest

from latte.errors import UserError
from latte.plan.chips import CHIPS, parse_topology


def test_a_slice_has_chips_and_devices():
    assert parse_topology("v5e:16x16").devices == 256
    assert parse_topology("v5p:4x4x8").devices == 128
    assert parse_topology("v4:2x2x1").devices == 8
    assert parse_topology("v5e:16x16", 2).chips == 512


@pytest.mark.parametrize(
    ("name", "slices", "words"),
    [
        ("v9:2x2", 1, "there is no TPU 'v9'"),
        ("v5e:16", 1, "v5e has 2 dimensions, as in v5e:16x16"),
        ("v5e:0x4", 1, "is no slice"),
        ("v5p:4x4", 1, "as in v5p:4x4x8"),
        ("v5e:2x2", 0, "--slices is 0"),
    ],
)
def test_what_is_no_slice_is_refused(name, slices, words):
    with pytest.raises(UserError, match=words):
        parse_topology(name, slices)


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p"])
def test_a_clock_gives_the_peak(name):
    """Four matrix units of 128 × 128 a core, a product and a sum each cycle."""
    chip = CHIPS[name]
    assert chip.flops == pytest.approx(2 * 4 * 128**2 * chip.cores * chip.clock, rel=0.01)
