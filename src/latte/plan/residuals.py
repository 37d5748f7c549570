"""What the scan over layers keeps for its backward pass, by name.

Read from the traced step: where a scan runs backwards, the forward scan of as many trips gives it
stacked arrays. One that `checkpoint_name` names has that name, one that is the scan's carry is a
block's input.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

INPUT, OTHER = "block input", "other"


def saved_bytes(jaxpr: Any, repeats: int, rows: int, parts: int) -> dict[str, int]:
    """Bytes a device of what the scans of `repeats` trips keep of activations, all layers together.

    Args:
        jaxpr: of the step.
        rows: devices that share the rows and tokens of an activation.
        parts: devices that share the channels of all but a block's input.
    """
    found: dict[str, int] = {}
    for scan in _scans(_open(jaxpr)):
        if scan.params["length"] != repeats or scan.params["reverse"]:
            continue
        for name, shape, size in _kept(scan):
            if len(shape) < 3:
                continue  # of parameters, not of tokens
            share = rows if name == INPUT else rows * parts
            found[name] = found.get(name, 0) + prod(shape) * size // share
    return found


def _scans(jaxpr: Any) -> Iterator[Any]:
    """Scans of a program that are followed by one that runs backwards, wherever they are."""
    reverse = any(e.primitive.name == "scan" and e.params["reverse"] for e in jaxpr.eqns)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and reverse:
            yield equation
        for inner in _inner(equation):
            yield from _scans(inner)


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(_open(one), "eqns"):
                yield _open(one)


def _open(jaxpr: Any) -> Any:
    """A jaxpr, without the constants that it may be closed over."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _kept(scan: Any) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and item size of each stacked output."""
    body, carried = _open(scan.params["jaxpr"]), scan.params["num_carry"]
    inputs = body.invars[scan.params["num_consts"] :][:carried]
    made = {id(out): equation for equation in body.eqns for out in equation.outvars}
    for inside, outside in zip(body.outvars[carried:], scan.outvars[carried:], strict=True):
        name = INPUT if any(inside is x for x in inputs) else OTHER
        equation = made.get(id(inside))
        # What a block keeps is rounded to its own type, lest XLA keep more of it.
        while equation is not None and equation.primitive.name == "reduce_precision":
            equation = made.get(id(equation.invars[0]))
        if equation is not None and equation.primitive.name == "name":
            name = equation.params["name"]
        yield name, outside.aval.shape, outside.aval.dtype.itemsize
