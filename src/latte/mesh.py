"""The device mesh: its axes, and every way an array is laid out over them.

data      rows of a batch; each of its places holds a whole copy of the parameters. Where devices
          come in slices that only a data-centre network joins, the copies are spread over those.
fsdp      rows of a batch too; parameters and optimizer state are spread over it, and gathered
          where they are used
context   tokens of a row: ops exchange the states at the boundaries (`latte.ops.context`);
          parameters and optimizer state are spread over it as over fsdp
tensor    heads, with their latents and channels, and hidden units of MLPs

A program is laid out for the mesh that `jax.set_mesh` has put in force. XLA spreads what is between
the ops from the layouts of parameters and activations; ops run inside `jax.shard_map`, each device
on its own part, so that kernels need not know. On one device there is nothing of all this.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from latte.config import MeshConfig
from latte.errors import UserError

DATA, FSDP, CONTEXT, TENSOR = AXES = ("data", "fsdp", "context", "tensor")

_ROWS = (DATA, FSDP)
WHOLE = PartitionSpec()
"""The same on every device."""
TOKENS = PartitionSpec(_ROWS, CONTEXT)
"""Of a batch [B, T], and what a token has that is not spread: [B, T, D]."""
HEADS = PartitionSpec(_ROWS, CONTEXT, TENSOR)
"""Of [B, T, H, …], and of channels that belong to heads."""
_LOSSES = PartitionSpec(_ROWS, (CONTEXT, TENSOR))
"""Of tokens whose losses are taken: no two devices take the same."""

_SHARES = (FSDP, CONTEXT)
"""Of parameters: without context a model would be whole on each of the devices of a long row."""
_COLUMNS, _ROWS_OF = PartitionSpec(_SHARES, TENSOR), PartitionSpec(TENSOR, _SHARES)
_TABLE, _CHANNELS = PartitionSpec(None, (*_SHARES, TENSOR)), PartitionSpec(TENSOR)
_PARAMETERS = {
    "project_q.weight": _COLUMNS,
    "project_k.weight": _COLUMNS,
    "project_v.weight": _COLUMNS,
    "project_window_q.weight": _COLUMNS,
    "project_window_k.weight": _COLUMNS,
    "project_in.weight": _COLUMNS,
    "project_gate.weight": _COLUMNS,
    "project_out.weight": _ROWS_OF,
    "gate_decay.weight": PartitionSpec(TENSOR, _SHARES, None),
    "gate_input.weight": PartitionSpec(TENSOR, _SHARES, None),
    "gate_decay.bias": _CHANNELS,
    "gate_input.bias": _CHANNELS,
    "forward.lam": _CHANNELS,
    "backward.lam": _CHANNELS,
    "source.taps": PartitionSpec(None, TENSOR),
    "embedding.weight": _TABLE,
    "backbone.position_table": _TABLE,
    "head.weight": PartitionSpec((*_SHARES, TENSOR), None),
}
"""By the names of a parameter and of what holds it, for its last axes: blocks are stacked along
one more in front. Others (norms) are whole on every device."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that a config names, over all devices of all processes or those that are given.

    Raises:
        UserError: the devices do not fill it.
    """
    devices = jax.devices() if devices is None else devices
    inner = config.fsdp, config.context, config.tensor
    count, needed = len(devices), int(np.prod(inner))
    data = config.data or count // needed
    if data * needed != count or not data:
        raise UserError(
            f"a mesh of data {config.data or 'as many as are left'}, fsdp {inner[0]}, context "
            f"{inner[1]}, tensor {inner[2]} does not fill {count} devices: their product must be "
            f"{count} (--mesh.data 0 takes what the others leave)"
        )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    types = (AxisType.Auto,) * len(AXES)
    if slices == 1:
        return jax.make_mesh((data, *inner), AXES, axis_types=types, devices=devices)
    if data % slices:
        raise UserError(f"--mesh.data {data} does not spread evenly over {slices} slices")
    shape, over_network = (data // slices, *inner), (slices, 1, 1, 1)
    grid = mesh_utils.create_hybrid_device_mesh(shape, over_network, devices=devices)
    return Mesh(grid, AXES, axis_types=types)


def check_rows(mesh: Mesh, rows: int) -> None:
    """Refuses microbatches whose rows do not spread evenly.

    Raises:
        UserError: they do not.
    """
    copies = mesh.shape[DATA] * mesh.shape[FSDP]
    if rows % copies:
        raise UserError(
            f"{rows} rows of a microbatch do not spread evenly over {copies} places of the mesh "
            f"(data × fsdp): set --train.batch_size to a multiple of {copies} × --train.accumulate"
        )


# --- layouts -----------------------------------------------------------------------------------


def _fit(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec without axes that do not divide what they are to spread."""

    def divides(axes: Any, size: int) -> bool:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return size % int(np.prod([mesh.shape[name] for name in names])) == 0

    pairs = zip(tuple(spec), shape, strict=False)
    return PartitionSpec(*(axes if divides(axes, size) else None for axes, size in pairs))


def _parameter_spec(path: tuple, leaf: Any) -> PartitionSpec:
    names = [key.name for key in path if hasattr(key, "name")]
    spec = _PARAMETERS.get(".".join(names[-2:]), WHOLE)
    return PartitionSpec(*[None] * (leaf.ndim - len(spec)), *tuple(spec))


def shardings(tree: PyTree) -> PyTree:
    """The layout of a model, its gradients or its optimizer state, given as arrays or shapes."""
    mesh = jax.sharding.get_mesh()

    def one(path: tuple, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _fit(_parameter_spec(path, leaf), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, tree)


# --- in a program ------------------------------------------------------------------------------


def _in_force() -> AbstractMesh | None:
    """The mesh that a program is traced for, if it has more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Lays x out as `spec` says, as far as the mesh in force divides it."""
    mesh = _in_force()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, _fit(spec, x.shape, mesh))


def _spread(function: Callable, specs: Any, out: Any, *args: Any) -> Any:
    # Kernels and hand-written derivatives say nothing of what varies over the mesh.
    spread = jax.shard_map(function, in_specs=specs, out_specs=out, check_vma=False)
    return spread(*args)


def _op_spec(x: Array) -> PartitionSpec:
    """Of an op's argument: parameters have channels last, arrays [B, T, …] heads or channels."""
    return {1: PartitionSpec(TENSOR), 2: PartitionSpec(None, TENSOR)}.get(x.ndim, HEADS)


def run_op(
    op: Callable[..., tuple[Array, Any]],
    arrays: Sequence[Array],
    segment_ids: Int[Array, "B T"],
    state: PyTree | None = None,
) -> tuple[Array, Any]:
    """An op of `latte.ops`, each device on its part: y, and the state after the last token.

    With a state, as in generation, all devices do the same. Without one the state that is returned
    is None where there are several devices: it is in parts, which training has no use for.

    Args:
        op: takes `arrays`, and by name segment_ids, state and axis.
        arrays: [B, T, H or W, …], of which y has the first one's layout, or parameters.
    """
    mesh = _in_force()
    if mesh is None:
        return op(*arrays, segment_ids=segment_ids, state=state)
    if state is not None:

        def whole(arrays: Sequence[Array], ids: Array, state: PyTree) -> tuple[Array, Any]:
            return op(*arrays, segment_ids=ids, state=state)

        return _spread(whole, WHOLE, WHOLE, arrays, segment_ids, state)
    ids_spec = _fit(TOKENS, segment_ids.shape, mesh)
    axis = CONTEXT if mesh.shape[CONTEXT] > 1 and ids_spec[1] is not None else None

    def part(ids: Array, *arrays: Array) -> Array:
        return op(*arrays, segment_ids=ids, **({} if axis is None else {"axis": axis}))[0]

    specs = [_fit(_op_spec(x), x.shape, mesh) for x in arrays]
    return _spread(part, (ids_spec, *specs), specs[0], segment_ids, *arrays), None


def run_place(
    place: Callable[..., tuple[Array, Array]], segment_ids: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]] | None:
    """`latte.ops.segments.place` of rows that are spread; None where there is one device."""
    mesh = _in_force()
    if mesh is None:
        return None
    spec = _fit(TOKENS, segment_ids.shape, mesh)
    axis = CONTEXT if spec[1] is not None else None
    return _spread(lambda ids: place(ids, axis=axis), spec, (spec, spec), segment_ids)


def look_up(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of a table, which every device gathers whole."""
    mesh = _in_force()
    if mesh is None:
        return table[tokens]
    spec = _fit(TOKENS, tokens.shape, mesh)
    return _spread(lambda table, tokens: table[tokens], (WHOLE, spec), spec, table, tokens)


def sum_losses(losses: Callable[..., PyTree], table: Float[Array, "V D"], *tokens: Array) -> PyTree:
    """Sums that `losses` takes over arrays [B, T, …] with a table, over all devices.

    Each device takes tokens of its own, those of the tensor axis too, with the whole table.
    """
    mesh = _in_force()
    if mesh is None:
        return losses(table, *tokens)
    spec = _fit(_LOSSES, tokens[0].shape, mesh)
    if any(axes is None for axes in spec):
        # Some devices would take the same tokens: one of them is heard.
        return _spread(losses, WHOLE, WHOLE, table, *tokens)

    def part(table: Array, *tokens: Array) -> PyTree:
        return jax.tree.map(lambda total: total[None], losses(table, *tokens))

    totals = _spread(part, (WHOLE, *[spec] * len(tokens)), PartitionSpec(AXES), table, *tokens)
    return jax.tree.map(lambda total: jnp.sum(total, axis=0), totals)


def place_rows(batch: PyTree) -> PyTree:
    """Shapes of a batch with the layout that `put_rows` gives it."""
    mesh = jax.sharding.get_mesh()

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, _fit(TOKENS, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, batch)


# --- from the host -----------------------------------------------------------------------------


def rows_here(rows: int) -> Int[np.ndarray, " R"]:
    """Which rows of a global batch this process's devices hold, in order."""
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, _fit(PartitionSpec(_ROWS), (rows,), mesh))
    held = sharding.addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[index] for index in held]))


def put_flag(value: bool) -> Bool[Array, " devices"]:
    """This process's value on each of its devices; any(…) of it in a program hears all of them."""
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.full((1,), value))


def put_rows(batch: PyTree, rows: int, here: Int[np.ndarray, " R"] | None = None) -> PyTree:
    """A global batch of `rows` as arrays of all devices; `here` says which rows `batch` holds."""
    mesh = jax.sharding.get_mesh()
    held = np.arange(rows) if here is None else here

    def put(x: np.ndarray) -> Array:
        shape = (rows, *x.shape[1:])
        sharding = NamedSharding(mesh, _fit(TOKENS, shape, mesh))

        def part(index: tuple | None) -> np.ndarray:
            assert index is not None
            wanted = np.arange(rows)[index[0]]
            return x[np.searchsorted(held, wanted)][:, index[1]]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(put, batch)
