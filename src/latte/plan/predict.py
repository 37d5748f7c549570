"""How long a step takes, predicted from its compiled program.

Every instruction takes the largest of three times: its products' arithmetic at the chip's peak,
what it reads and writes of the HBM at its bandwidth, and the bundles of its schedule at the clock
(loops in it weighted by their trips). Instructions of one device run one after another. Beside them
run copies that the compiler starts ahead, and collectives that it hides: of a loop's body they
count as far as they exceed the rest of it. Other collectives are waited for. Transfers between
slices take the network one after another, each from the instruction that begins it, and are waited
for where the program needs the result, if it is not there yet (loops in between are not counted as
time to hide in). So a step is

    Σ over loop bodies, trips × (Σ matrix + Σ kernels + Σ memory + Σ collectives waited for
                                 + excess of copies + excess of hidden collectives
                                 + waits for the network)

where an instruction with a product is of the matrix units, a Pallas kernel is a kernel, and the
rest is memory. Nothing is added for the host, stragglers, or waits inside a kernel, so the MFU that
follows is meant as an upper bound; bundles of both sides of a branch count, which errs the other
way, by a few percent of a product that is fused with the steps of a collective.

Calibration, by known programs (`tests/plan/test_calibration.py`): a product of two 8,192² bfloat16
matrices has bundles for 83% of its time at the peak on v5e, 97% on v5p and 127% on v6e, so that it
is predicted at 100%, 100% and 79% of the peak; an addition of two float32 arrays of 256 MiB has
bundles for 7% to 11% of its time at the bandwidth, and is predicted at all of that. XLA's own
`estimated_cycles` say 1.1 to 1.4 times the time at the peak for the product, and 1.7 to 2.3 times
that at the bandwidth for the addition.

No whole step has been timed against this. Nearest is what MaxText publishes, 61% and 67% MFU of
dense models of 16B and 32B parameters on 256 v5e chips: `transformer_1b` there is predicted at 49%,
and outside attention's kernels, whose share falls with the width, its products run at 66% of
the peak.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from latte.plan.chips import Chip
from latte.plan.collectives import KINDS, Collective, Layout, collectives_of
from latte.plan.program import Instruction, Program, Visit
from latte.plan.schedule import Issue

_STILL = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "while",
    "conditional",
    "call",
    "copy-done",
    "slice-done",
    "after-all",
    "partition-id",
    "replica-id",
    "send",
    "send-done",
    "recv",
    "recv-done",
    *(f"{kind}-done" for kind in KINDS),
}
_AHEAD = {"copy-start", "slice-start"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and what they are made of; `hidden` is not in the total.

    interconnect: inside a slice. network: between slices. hidden: of both.
    """

    matrix: float = 0.0
    kernels: float = 0.0
    memory: float = 0.0
    interconnect: float = 0.0
    network: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return self.matrix + self.kernels + self.memory + self.interconnect + self.network

    def plus(self, other: "StepTime", times: int) -> "StepTime":
        return StepTime(
            *(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self))
        )


@dataclass(frozen=True)
class Cost:
    """One instruction, a run of it: what it needs, and the time that follows."""

    name: str
    part: str
    flops: int
    bytes: int
    issue: Issue | None
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes, all of a step: what a device sends."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float
    hidden: bool
    network: bool = False


@dataclass(frozen=True)
class Prediction:
    """A step: its time, products and what it sends; kernels by name with seconds a step."""

    time: StepTime
    flops: int
    traffic: list[Traffic]
    kernels: dict[str, float]


Schedule = Callable[[str], Issue | None]
"""The schedule of an instruction, by its name."""


def costs(program: Program, visit: Visit, chip: Chip, schedule: Schedule) -> Iterator[Cost]:
    """What each instruction of a computation takes by itself, on one device."""
    for instruction in visit.computation.instructions.values():
        if instruction.opcode in _STILL | _AHEAD or _only_sends(program, instruction):
            continue
        flops = program.flops(visit.computation, instruction)
        moved = program.hbm_bytes(visit.computation, instruction)
        issue = schedule(instruction.name)
        part = "kernels" if instruction.is_kernel else "matrix" if flops else "memory"
        seconds = max(
            chip.devices * flops / chip.flops,
            chip.devices * moved / chip.bandwidth,
            issue.cycles / chip.clock if issue else 0.0,
        )
        yield Cost(instruction.name, part, flops, moved, issue, seconds)


def _only_sends(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction is a collective and nothing else that takes time."""
    if instruction.opcode.removesuffix("-start") in KINDS or instruction.opcode == "async-start":
        return True
    inner = [part.opcode for _, part in program.within(instruction)]
    sends = any(opcode.removesuffix("-start") in KINDS for opcode in inner)
    return sends and not {"convolution", "dot"} & set(inner)


def predict(program: Program, layout: Layout, schedule: Schedule) -> Prediction:
    """A step of a compiled program."""
    chip = layout.topology.chip
    total, flops, kernels = StepTime(), 0, {}
    traffic: dict[tuple, Traffic] = {}
    for visit in program.visits():
        each = list(costs(program, visit, chip, schedule))
        sent = list(collectives_of(program, visit.computation, layout))
        total = total.plus(_time(program, visit, chip, each, sent), visit.times)
        flops += visit.times * sum(cost.flops for cost in each)
        for cost in each:
            if cost.part == "kernels":
                name = cost.name.rstrip("0123456789.")
                kernels[name] = kernels.get(name, 0.0) + visit.times * cost.seconds
        for _, one in sent:
            _add(traffic, one, visit.times)
    return Prediction(total, flops, list(traffic.values()), kernels)


_Sent = list[tuple[Instruction, Collective]]


def _time(program: Program, visit: Visit, chip: Chip, each: list[Cost], sent: _Sent) -> StepTime:
    """One run of a computation, what it calls left out."""
    parts = {"matrix": 0.0, "kernels": 0.0, "memory": 0.0}
    for cost in each:
        parts[cost.part] += cost.seconds
    instructions = visit.computation.instructions.values()
    ahead = sum(program.hbm_bytes(visit.computation, i) for i in instructions if i.opcode in _AHEAD)
    moved = chip.devices * (ahead + sum(cost.bytes for cost in each)) / chip.bandwidth
    parts["memory"] += max(0.0, moved - sum(parts.values()))
    busy = sum(parts.values())
    inside = [c for _, c in sent if not c.network]
    hidden = sum((c.seconds for c in inside if c.hidden), 0.0)
    waited = sum((c.seconds for c in inside if not c.hidden), 0.0)
    network, beside = _waits(visit, each, sent)
    return StepTime(
        **parts,
        interconnect=waited + max(0.0, hidden - busy),
        network=network,
        hidden=min(hidden, busy) + beside,
    )


def _waits(visit: Visit, each: list[Cost], sent: _Sent) -> tuple[float, float]:
    """Seconds of transfers between slices in which a device waits, and in which it does not."""
    took = {cost.name: cost.seconds for cost in each}
    took |= {i.name: c.seconds for i, c in sent if not (c.network or c.hidden)}
    transfers = {i.name: c.seconds for i, c in sent if c.network}
    instructions = visit.computation.instructions
    now = free = waited = 0.0
    ends: dict[str, float] = {}
    for instruction in instructions.values():
        if instruction.name in transfers:
            free = max(now, free) + transfers[instruction.name]
            ends[instruction.operands[-1]] = free
        elif instruction.opcode == "recv-done":
            # Both ends of a transfer come after one token.
            token = instructions[instruction.operands[0]].operands[-1]
            late = max(0.0, ends.get(token, now) - now)
            waited, now = waited + late, now + late
        now += took.get(instruction.name, 0.0)
    return waited, max(0.0, sum(transfers.values()) - waited)


def _add(traffic: dict[tuple, Traffic], one: Collective, times: int) -> None:
    key = one.kind, one.axes, one.hidden, one.network
    before = traffic.get(key, Traffic(one.kind, one.axes, 0, 0.0, one.hidden, one.network))
    traffic[key] = replace(
        before,
        bytes=before.bytes + times * one.bytes,
        seconds=before.seconds + times * one.seconds,
    )
