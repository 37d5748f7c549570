"""The device mesh: its axes, and every way an array is laid out over them."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from latte.errors import UserError

DATA = "data"
"""Rows of a batch are spread over this axis; parameters are whole on each device."""


def make_mesh(rows: int) -> Mesh:
    """All devices of this process along `data`.

    Raises:
        UserError: the rows of a microbatch do not spread evenly.
    """
    devices = jax.devices()
    if rows % len(devices):
        raise UserError(
            f"{rows} rows of a microbatch do not spread evenly over {len(devices)} devices: "
            f"set --train.batch-size to a multiple of {len(devices)} × --train.accumulate"
        )
    return jax.make_mesh((len(devices),), (DATA,), axis_types=(jax.sharding.AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The leading axis spread over `data`."""
    return NamedSharding(mesh, PartitionSpec(DATA))
