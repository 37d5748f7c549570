"""The best of microbatch × rematerialisation × mesh for a config on a slice, by planning them.

Of each mesh and each choice of what blocks keep, the largest microbatch that fits is the best one:
fewer, larger steps gather the parameters less often. So they shrink until one fits. Each plan is a
compilation of minutes.
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


def candidates(config: Config, topology: Topology) -> Iterator[list[list[Config]]]:
    """Of each mesh and each choice of what blocks keep (most first) the microbatches, largest
    first."""
    for mesh in meshes(config, topology):
        rows = config.train.batch_size // (mesh.data * mesh.fsdp)
        if rows * mesh.data * mesh.fsdp != config.train.batch_size:
            continue
        counts = [n for n in range(1, rows + 1) if rows % n == 0]
        try:
            yield [
                [validate(_variant(config, mesh, remat, count)) for count in counts]
                for remat in _REMAT
            ]
        except UserError:  # the mesh does not fit the model
            continue


def _variant(config: Config, mesh: MeshConfig, remat: str, accumulate: int) -> Config:
    return replace(
        config,
        model=replace(config.model, remat=remat),
        train=replace(config.train, accumulate=accumulate),
        mesh=mesh,
    )


def search(config: Config, topology: Topology, tell: Callable[[Plan], None]) -> Plan:
    """The plan of the shortest step among those that fit; `tell` hears of each that was tried.

    Raises:
        UserError: no mesh fills the slice evenly.
        RunFailedError: none fits.
    """
    found: list[Plan] = []
    for groups in candidates(config, topology):
        for group in groups:
            found += _largest(group, topology, tell)
            if found[-1].memory.fits and found[-1].config == group[0]:
                break  # where the whole batch fits, nothing is won by keeping less
            if found[-1].memory.parameters + found[-1].memory.optimizer > found[-1].memory.room:
                break
    if not found:
        raise UserError(
            f"the {config.train.batch_size} rows of a batch do not spread evenly over "
            f"{topology.devices} devices; change --train.batch_size or --mesh.context"
        )
    fitting = [one for one in found if one.memory.fits]
    if not fitting:
        raise RunFailedError(
            f"nothing that was tried fits {topology.name}: take a larger slice, shorter rows "
            "(--train.sequence_length), or more devices a row (--mesh.context)"
        )
    return min(fitting, key=lambda one: one.seconds)


def _largest(group: list[Config], topology: Topology, tell: Callable[[Plan], None]) -> list[Plan]:
    """Plans microbatches until one fits; those that are clearly too large are passed over."""
    tried: list[Plan] = []
    for each in group:
        if tried and _hopeless(tried[-1], each):
            continue
        tried.append(plan(each, topology))
        tell(tried[-1])
        if tried[-1].memory.fits:
            break
    return tried


def _hopeless(before: Plan, config: Config) -> bool:
    """Whether a smaller microbatch is too large, even if it took only half of what it should."""
    memory = before.memory
    state = memory.parameters + memory.optimizer
    share = before.config.train.accumulate / config.train.accumulate
    return (memory.total - state) * share / 2 > memory.room - state
