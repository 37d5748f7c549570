"""Saves or restores arrays of 512 MB, as one of several processes, and says what that took.

python -m tests.training.restoring save|restore FOLDER
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from latte import processes
from latte.checkpoint import Checkpoints, Keep
from latte.config import MeshConfig
from latte.mesh import FSDP, make_mesh

COUNT, SHAPE = 8, (8192, 2048)
WHOLE = COUNT * 4 * SHAPE[0] * SHAPE[1]


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main(action: str, folder: str) -> None:
    processes.start(60)
    mesh = make_mesh(MeshConfig(fsdp=jax.device_count()))
    layout = NamedSharding(mesh, PartitionSpec(FSDP))
    if action == "save":
        make = jax.jit(partial(jnp.full, SHAPE), out_shardings=layout)
        checkpoints = Checkpoints(folder, Keep(1))
        checkpoints.save(1, {"state": {str(i): make(float(i)) for i in range(COUNT)}})
        checkpoints.close()
        return
    target = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=layout)
    before = resident()
    restored = Checkpoints(folder).restore({"state": dict.fromkeys(map(str, range(COUNT)), target)})
    assert restored is not None
    arrays = restored[0]["state"]
    shards = [(i, shard.data) for i, x in arrays.items() for shard in x.addressable_shards]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = {
        "held": sum(data.nbytes for _, data in shards),
        "right": all(bool((data == float(i)).all()) for i, data in shards),
        "peak": peak - before,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
