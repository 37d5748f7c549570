"""Compiles a config's training step for a slice that is not there; run as a process of its own.

libtpu reads its flags once, when it is loaded, and takes half a gigabyte: so `compile_apart` starts
a process, which reads a request on standard input and leaves what it found in a folder: the
program's HLO, the schedule of every instruction, and `facts.json`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from latte.config import Config, from_json, to_json
from latte.errors import RunFailedError, UserError
from latte.plan.chips import GIB, Topology, parse_topology
from latte.plan.schedule import dump_flags

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Of the environment, so that libtpu compiles where there is no TPU, beside others that do."""


@dataclass(frozen=True)
class Facts:
    """What a compiled step is; bytes are of one device.

    memory: the compiler's sizes, empty where the program does not fit. needed, room: then, what it
        says the program needs and what there is; else its total and 0.
    saved: what the layers keep for the backward pass, by name.
    axes: of the mesh. places: coordinates and slice of each of its devices, in its order.
    flops_per_token: of the model.
    """

    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    saved: dict[str, int]
    memory: dict[str, int]
    needed: int
    room: int
    flops_per_token: float
    axes: dict[str, int]
    places: list[list]
    compile_seconds: float


def compile_apart(config: Config, topology: Topology, folder: Path) -> Facts:
    """Compiles in another process; the program, if it fits, is then `folder`/program.txt.

    Raises:
        UserError: no compiler, a slice that libtpu does not know, or a mesh that does not fill it.
        RunFailedError: the compiler failed, for another reason than memory.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            'the compiler of TPU programs is missing (it needs no TPU): pip install "jax[tpu]"'
        )
    settings = NO_TPU | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program would leave no schedule
        "LIBTPU_INIT_ARGS": dump_flags(folder),
    }
    request = {
        "config": to_json(config),
        "topology": topology.name,
        "slices": topology.slices,
        "folder": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "latte.plan.build"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )
    if done.returncode == 2:
        raise UserError(done.stderr.splitlines()[-1])
    if done.returncode:
        raise RunFailedError(f"the step did not compile: {done.stderr[-2000:]}")
    return Facts(**json.loads((folder / "facts.json").read_text(encoding="utf-8")))


# --- in the process that compiles ----------------------------------------------------------------


def devices_of(topology: Topology) -> Sequence[Any]:
    """The devices of a slice, for the compiler only.

    Raises:
        UserError: libtpu knows no such slice.
    """
    from jax.experimental import topologies

    more = {"num_slices": topology.slices} if topology.slices > 1 else {}
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, **more
        ).devices
    except Exception as error:
        message = " ".join(str(error).split())
        raise UserError(f"libtpu has no slice {topology.name}: {message}") from error
    return found


def arguments_of(config: Config, mesh: Any) -> tuple[Any, Any]:
    """State and batch of a step, as shapes with their layouts."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from latte.data.batch import Batch
    from latte.mesh import place_rows
    from latte.run import place_like
    from latte.train import initial_state

    shape = config.train.batch_size, config.train.sequence_length
    types = (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    with jax.set_mesh(mesh):
        state = place_like(eqx.filter_eval_shape(initial_state, config))
        rows: list[Any] = [jax.ShapeDtypeStruct(shape, each) for each in types]
        return state, place_rows(Batch(*rows))


def trace_step(config: Config, state: Any, batch: Any, mesh: Any) -> Any:
    """The step as a run of the config would have it compiled, traced for TPUs of a mesh."""
    import jax

    from latte.ops.dispatch import tracing_for
    from latte.train import train_step

    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    # Of a concrete mesh JAX would look for the devices; what is traced asks only for its axes.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tracing_for("tpu"):
        step = jax.jit(partial(train_step, config), donate_argnums=0, out_shardings=(layout, None))
        return step.trace(state, batch)


def _bytes_here(tree: Any) -> int:
    """Of shapes with their layouts, on one device."""
    import jax
    import numpy as np

    def one(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return int(np.prod(shape)) * leaf.dtype.itemsize

    return sum(one(leaf) for leaf in jax.tree.leaves(tree))


def memory_of(compiled: Any) -> dict[str, int]:
    """The compiler's sizes, in bytes of one device."""
    stats = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def total_of(memory: dict[str, int]) -> int:
    """Bytes that a step takes: results that take an argument's place count once."""
    return sum(memory.values()) - 2 * memory["alias"]


def with_sizes(config: Config) -> Config:
    """The config with the sizes that a run takes from its tokenizer and its rows."""
    from latte.data.manifest import read_manifest
    from latte.data.place import Place
    from latte.data.tokenizer import open_tokenizer

    model, data = config.model, config.data
    vocab_size = model.vocab_size
    if not vocab_size and data.store:
        vocab_size = read_manifest(Place(data.store)).vocab_size
    elif not vocab_size and data.tokenizer == "sentencepiece":
        vocab_size = data.tokenizer_vocab
    elif not vocab_size:
        vocab_size = open_tokenizer(data.tokenizer).vocab_size
    max_length = model.max_length or config.train.sequence_length
    return replace(config, model=replace(model, vocab_size=vocab_size, max_length=max_length))


def find_facts(config: Config, topology: Topology, folder: Path) -> Facts:
    """Compiles, and leaves the program in the folder."""
    import jax

    from latte.cost import count_parameters, shapes, training_flops_per_token
    from latte.mesh import check_rows, make_mesh
    from latte.plan.residuals import saved_bytes

    config = with_sizes(config)
    mesh = make_mesh(config.mesh, devices_of(topology))
    check_rows(mesh, config.train.batch_size // config.train.accumulate)
    state, batch = arguments_of(config, mesh)
    traced = trace_step(config, state, batch, mesh)
    axes = {str(name): int(size) for name, size in mesh.shape.items()}
    rows = mesh.size // axes["tensor"]
    saved = saved_bytes(
        traced.jaxpr,
        config.model.layers // len(config.model.pattern),
        rows,
        axes["tensor"],
    )
    start = time.perf_counter()
    memory, needed, room = {}, 0, 0
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed, room = _exceeded(str(error), _bytes_here((state, batch)))
    else:
        memory = memory_of(compiled)
        needed = total_of(memory)
        (folder / "program.txt").write_text(compiled.as_text() or "", encoding="utf-8")
    model = shapes(config.model)
    return Facts(
        parameters=count_parameters(model),
        parameter_bytes=_bytes_here(state.model),
        optimizer_bytes=_bytes_here(state.optim),
        batch_bytes=_bytes_here(batch),
        saved=saved,
        memory=memory,
        needed=needed,
        room=room,
        flops_per_token=training_flops_per_token(config.model, config.train.sequence_length),
        axes=axes,
        places=[[list(d.coords), getattr(d, "slice_index", 0) or 0] for d in mesh.devices.flat],
        compile_seconds=time.perf_counter() - start,
    )


_REFUSALS = (
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
    r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
)
"""As the compiler says what a program needs and has; the second leaves the arguments out."""


def _exceeded(message: str, arguments: int) -> tuple[int, int]:
    """What a program needs and what there is, from the compiler's refusal.

    Raises:
        RunFailedError: it refused for another reason.
    """
    for kind, pattern in enumerate(_REFUSALS):
        found = re.search(pattern, message)
        if found:
            needed, room = (
                round(float(size) * _UNITS[unit])
                for size, unit in (found.group(1, 2), found.group(3, 4))
            )
            return needed + kind * arguments, room
    raise RunFailedError(f"the step did not compile: {message[:2000]}")


def main() -> int:
    """Answers one request; the exit status is that of `latte`."""
    request = json.loads(sys.stdin.read())
    config = from_json(request["config"])
    folder = Path(request["folder"])
    try:
        topology = parse_topology(request["topology"], request["slices"])
        facts = find_facts(config, topology, folder)
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    (folder / "facts.json").write_text(json.dumps(asdict(facts)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
