"""The best of microbatch × rematerialisation × mesh for a config on a slice, by planning them.

Of each mesh and each choice of what blocks keep, the largest microbatch that fits is the best one:
fewer, larger steps gather the parameters less often. So microbatches are halved until one fits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from latte.config import Config, MeshConfig, validate
from latte.errors import RunFailedError, UserError
from latte.plan import Plan, plan
from latte.plan.chips import Topology

_REMAT = ("none", "dots", "full")


def meshes(config: Config, topology: Topology) -> Iterator[MeshConfig]:
    """Of the config's context: parameters whole, over one side of the torus, and over all of it;
    and layers over two devices."""
    devices, context = topology.devices, config.mesh.context
    within = devices // topology.slices
    seen = set()
    for tensor in (1, 2):
        for fsdp in (1, topology.shape[-1], within // (context * tensor)):
            inner = fsdp * context * tensor
            mesh = MeshConfig(devices // inner if inner else 0, fsdp, context, tensor)
            if inner and within % inner == 0 and mesh not in seen:
                seen.add(mesh)
                yield mesh


def candidates(config: Config, topology: Topology) -> Iterator[list[Config]]:
    """Groups of one mesh and one choice of what blocks keep, the largest microbatch first."""
    for mesh in meshes(config, topology):
        rows = config.train.batch_size // (mesh.data * mesh.fsdp)
        if rows * mesh.data * mesh.fsdp != config.train.batch_size:
            continue
        counts = [n for n in range(1, rows + 1) if rows % n == 0]
        for remat in _REMAT:
            group = [
                replace(
                    config,
                    model=replace(config.model, remat=remat),
                    train=replace(config.train, accumulate=count),
                    mesh=mesh,
                )
                for count in counts
            ]
            try:
                yield [validate(each) for each in group]
            except UserError:
                continue


def search(config: Config, topology: Topology, tell: Callable[[Plan], None]) -> Plan:
    """The plan of the shortest step among those that fit; `tell` hears of each that was tried.

    Raises:
        UserError: no mesh fills the slice evenly.
        RunFailedError: none fits.
    """
    best, tried = None, False
    for group in candidates(config, topology):
        for each in group:
            found = plan(each, topology)
            tried = True
            tell(found)
            if found.memory.fits:
                best = found if best is None or found.seconds < best.seconds else best
                break
    if not tried:
        raise UserError(
            f"the {config.train.batch_size} rows of a batch do not spread evenly over "
            f"{topology.devices} devices; change --train.batch_size or --mesh.context"
        )
    if best is None:
        raise RunFailedError(
            f"nothing that was tried fits {topology.name}: take a larger slice, shorter rows "
            "(--train.sequence_length), or more devices a row (--mesh.context)"
        )
    return best
