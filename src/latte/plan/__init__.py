"""What a run would take on a slice of TPUs, with none at hand: `latte plan`.

The real training step, kernels included, is compiled for the slice (`build`), and the program read
(`program`, `collectives`, `schedule`) and timed (`predict`). Memory is the compiler's own.
"""

import tempfile
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from latte.config import Config
from latte.errors import UserError
from latte.plan.build import Facts, compile_apart
from latte.plan.chips import Topology
from latte.plan.collectives import Layout, Place
from latte.plan.predict import Prediction, predict
from latte.plan.program import Program
from latte.plan.schedule import Schedules


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. `total` is the compiler's, `room` what there is.

    saved: what the layers keep for the backward pass, by name, as far as it is in the HBM at all;
    the rest of the total (gradients, gathered parameters, temporaries, the program) is `remainder`.
    """

    parameters: int
    optimizer: int
    saved: dict[str, int]
    remainder: int
    total: int
    room: int

    @property
    def fits(self) -> bool:
        return self.total <= self.room


@dataclass(frozen=True)
class Plan:
    """A config on a slice. Without a prediction where the compiler refused it for memory.

    flops: of the model, a step, all devices. mend: what would make it fit, if it does not.
    """

    config: Config
    topology: Topology
    parameters: int
    memory: Memory
    flops: float
    prediction: Prediction | None
    mend: str
    compile_seconds: float

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def seconds(self) -> float:
        """Of a step; infinite where there is no prediction."""
        return self.prediction.time.total if self.prediction else float("inf")

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the slice's peak."""
        return self.flops / self.seconds / (self.topology.chip.flops * self.topology.chips)

    @property
    def days(self) -> float:
        """Of the whole run."""
        return self.config.train.steps * self.seconds / 86_400


def plan(config: Config, topology: Topology) -> Plan:
    """Compiles a config's step for a slice and predicts it.

    Raises:
        UserError: the mesh does not fill the slice, or there is no compiler.
    """
    check_fills(config, topology)
    inner = config.mesh.fsdp * config.mesh.context * config.mesh.tensor
    config = replace(config, mesh=replace(config.mesh, data=topology.devices // inner))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        facts = compile_apart(config, topology, folder)
        prediction = _predict(facts, topology, folder) if facts.memory else None
    memory = _memory(facts, topology)
    return Plan(
        config=config,
        topology=topology,
        parameters=facts.parameters,
        memory=memory,
        flops=facts.flops_per_token * config.train.batch_size * config.train.sequence_length,
        prediction=prediction,
        mend="" if memory.fits else _mend(config, facts, memory.room),
        compile_seconds=facts.compile_seconds,
    )


def check_fills(config: Config, topology: Topology) -> None:
    """Refuses a mesh that does not fill a slice.

    Raises:
        UserError: it does not.
    """
    mesh, count = config.mesh, topology.devices
    inner = mesh.fsdp * mesh.context * mesh.tensor
    data = mesh.data or count // inner
    if data * inner != count or not data:
        what = f"{topology.slices} × {topology.name}" if topology.slices > 1 else topology.name
        raise UserError(
            f"a mesh of data {mesh.data or 'as many as are left'}, fsdp {mesh.fsdp}, context "
            f"{mesh.context}, tensor {mesh.tensor} does not fill the {count} devices of {what}: "
            f"their product must be {count} (--mesh.data 0 takes what the others leave)"
        )


def _predict(facts: Facts, topology: Topology, folder: Path) -> Prediction:
    places = [Place(tuple(at), index) for at, index in facts.places]
    program = Program((folder / "program.txt").read_text(encoding="utf-8"))
    return predict(program, Layout(facts.axes, places, topology), Schedules(folder))


def _memory(facts: Facts, topology: Topology) -> Memory:
    chip = topology.chip
    room = facts.room or int((chip.memory - chip.reserved) / chip.devices)
    known = facts.parameter_bytes + facts.optimizer_bytes
    # Saved arrays that the compiler keeps in the vector memory take nothing of the total.
    saved, left = {}, max(0, facts.needed - known)
    for name, size in facts.saved.items():
        saved[name] = min(size, left)
        left -= saved[name]
    return Memory(facts.parameter_bytes, facts.optimizer_bytes, saved, left, facts.needed, room)


def _mend(config: Config, facts: Facts, room: int) -> str:
    """The settings that would make a config fit, by what takes the memory."""
    state = facts.parameter_bytes + facts.optimizer_bytes
    train, mesh = config.train, config.mesh
    if state > room / 2:
        return (
            f"parameters and optimizer take {state / 2**30:.2f} GiB of each device: spread them "
            f"over more with --mesh.fsdp {2 * mesh.fsdp} --mesh.data 0, or take a larger slice"
        )
    if config.model.remat != "full":
        return "keep only the blocks' inputs with --model.remat full"
    rows = train.batch_size // train.accumulate
    places = facts.axes["data"] * facts.axes["fsdp"]
    wanted = ceil((facts.needed - state) / (room - state))
    counts = [n for n in range(1, rows // places + 1) if (rows // places) % n == 0 and n >= wanted]
    if counts and wanted > 1:
        return f"take smaller microbatches with --train.accumulate {train.accumulate * counts[0]}"
    return f"spread each row over more devices with --mesh.context {2 * mesh.context} --mesh.data 0"
