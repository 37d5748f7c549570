"""Ops are called by their names in `latte.ops`."""

import jax.numpy as jnp
import pytest

from latte import ops


@pytest.mark.parametrize(
    ("name", "shapes", "settings"),
    [
        ("latte", [(2, 5, 3, 4), (2, 5, 3, 4), (2, 5, 3, 6)], {}),
        ("rg_lru", [(2, 5, 6), (2, 5, 6), (2, 5, 6), (6,)], {}),
        ("attention", [(2, 5, 3, 6)] * 3, {"window": 2}),
        ("conv", [(2, 5, 6), (3, 6), (6,)], {}),
        ("macchiato", [(2, 5, 3, 5), (2, 5, 3, 4), *[(2, 5, 3, 6)] * 3], {"window": 2}),
    ],
)
def test_an_op_goes_on_from_its_state(name, shapes, settings):
    op, arrays = getattr(ops, name), [jnp.ones(shape) for shape in shapes]
    y, state = op(*arrays, **settings)
    again, _ = op(*arrays, **settings, state=state)
    assert y.shape == again.shape == arrays[2 if len(shapes[0]) == 4 else 0].shape
    assert set(ops.__all__) >= {name}
