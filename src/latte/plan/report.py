"""A plan in words, and as JSON."""

from dataclasses import asdict
from typing import Any

from latte.plan import Plan
from latte.plan.chips import GIB

_PARTS = {
    "matrix": "matrix units",
    "kernels": "kernels",
    "memory": "memory",
    "interconnect": "interconnect",
    "network": "network between slices",
}


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def to_dict(plan: Plan) -> dict[str, Any]:
    """All figures of a plan; bytes are of one device, times are seconds of a step."""
    memory, config = plan.memory, plan.config
    found: dict[str, Any] = {
        "config": config.name,
        "topology": plan.topology.name,
        "slices": plan.topology.slices,
        "chips": plan.topology.chips,
        "mesh": asdict(config.mesh),
        "remat": config.model.remat,
        "accumulate": config.train.accumulate,
        "sequence_length": config.train.sequence_length,
        "tokens_per_step": plan.tokens,
        "parameters": plan.parameters,
        "memory": {**asdict(memory), "devices_per_chip": plan.topology.chip.devices},
        "fits": memory.fits,
        "model_flops": plan.flops,
        "compile_seconds": plan.compile_seconds,
    }
    if plan.prediction is None:
        return found | {"mend": plan.mend}
    prediction = plan.prediction
    return found | {
        "step": {"total": plan.seconds, **asdict(prediction.time)},
        "kernels": prediction.kernels,
        "product_flops_per_device": prediction.flops,
        "collectives": [asdict(one) for one in prediction.traffic],
        "tokens_per_second": plan.tokens / plan.seconds,
        "mfu": plan.mfu,
        "held_down_by": held_down_by(plan),
        "days": plan.days,
        "chip_hours": 24 * plan.days * plan.topology.chips,
    }


def held_down_by(plan: Plan) -> dict[str, float]:
    """Shares of a step: the model's own arithmetic at the peak, and what comes on top, in order."""
    assert plan.prediction is not None
    time, chip = plan.prediction.time, plan.topology.chip
    products = chip.devices * plan.prediction.flops / chip.flops
    model = plan.mfu * plan.seconds
    shares = {
        "recomputed products": max(0.0, products - model),
        "matrix units below their peak": time.matrix - max(products, 0.0),
        "kernels": time.kernels - max(0.0, model - products),
        "memory": time.memory,
        "interconnect": time.interconnect,
        "network between slices": time.network,
    }
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return {"model": plan.mfu} | {name: share / plan.seconds for name, share in ordered}


def misfit(plan: Plan) -> str:
    """One sentence: by how much a plan does not fit, and what would make it fit."""
    memory = plan.memory
    return (
        f"{plan.config.name} does not fit {plan.topology.name}: a device needs "
        f"{gib(memory.total)} and has {gib(memory.room)}, {gib(memory.total - memory.room)} too "
        f"little; {plan.mend}, or let --search look"
    )


def outline(plan: Plan) -> str:
    """One line, of the many that a search tries."""
    config, mesh = plan.config, plan.config.mesh
    time = f"{1e3 * plan.seconds:.1f} ms, MFU {plan.mfu:.1%}" if plan.prediction else "too much"
    return (
        f"data {mesh.data} fsdp {mesh.fsdp} context {mesh.context} tensor {mesh.tensor}, remat "
        f"{config.model.remat}, {config.train.accumulate} microbatches: "
        f"{gib(plan.memory.total)} of {gib(plan.memory.room)}, {time}"
    )


def describe(plan: Plan) -> str:
    """The lines that `latte plan` prints."""
    lines = [*_heading(plan), "", *_memory(plan)]
    if plan.prediction is not None:
        lines += ["", *_step(plan), "", *_collectives(plan), "", *_run(plan)]
    return "\n".join(lines)


def _heading(plan: Plan) -> list[str]:
    config, topology = plan.config, plan.topology
    mesh = ", ".join(f"{name} {size}" for name, size in asdict(config.mesh).items())
    count = f"{topology.slices} × {topology.name}" if topology.slices > 1 else topology.name
    return [
        f"{config.name}, {plan.parameters / 1e6:.1f}M parameters, on {count}: "
        f"{topology.chips} chips",
        f"mesh {mesh}; {plan.tokens:,} tokens a step in rows of {config.train.sequence_length:,}, "
        f"{config.train.accumulate} microbatches; remat {config.model.remat}; compiled in "
        f"{plan.compile_seconds:.0f} s",
    ]


def _memory(plan: Plan) -> list[str]:
    memory, each = plan.memory, plan.topology.chip.devices
    rows = [("parameters", memory.parameters), ("optimizer", memory.optimizer)]
    rows += [(f"saved: {name}", size) for name, size in memory.saved.items()]
    rows += [("remainder", memory.remainder), ("total", memory.total), ("there is", memory.room)]
    lines = ["memory                  a device        a chip"]
    lines += [f"  {name:20}{gib(size):>12}{gib(each * size):>14}" for name, size in rows]
    return lines


def _step(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    time = plan.prediction.time
    lines = [f"step                  {1e3 * plan.seconds:8.1f} ms"]
    for name, words in _PARTS.items():
        lines.append(f"  {words:20}{1e3 * getattr(time, name):8.1f} ms")
        if name == "kernels":
            each = sorted(plan.prediction.kernels.items(), key=lambda item: -item[1])
            lines += [f"    {kernel:40}{1e3 * seconds:8.1f} ms" for kernel, seconds in each]
    return [*lines, f"  (sent while other work runs: {1e3 * time.hidden:.1f} ms)"]


def _collectives(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    lines = ["collectives             over              sent a device"]
    for one in sorted(plan.prediction.traffic, key=lambda one: -one.seconds):
        axes = " × ".join(one.axes) or "none"
        lines.append(
            f"  {one.kind:20}  {axes:16}{one.bytes / 1e9:10.3f} GB {1e3 * one.seconds:8.1f} ms"
            f"{', hidden' if one.hidden else ''}{', between slices' if one.network else ''}"
        )
    return lines


def _run(plan: Plan) -> list[str]:
    held = [f"{name} {share:.0%}" for name, share in list(held_down_by(plan).items())[1:]]
    return [
        f"model {plan.flops:.3g} FLOP a step; {plan.tokens / plan.seconds:,.0f} tokens/s",
        f"MFU at most {plan.mfu:.1%}; the rest of the time: {', '.join(held)}",
        f"{plan.config.train.steps:,} steps, {plan.config.train.steps * plan.tokens / 1e9:.1f}B "
        f"tokens: {plan.days:.2f} days, {24 * plan.days * plan.topology.chips:,.0f} chip-hours",
    ]
