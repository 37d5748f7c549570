"""Values of settings: from text to the declared type, and what that type is called."""

import math
import shlex
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin


def kind_name(kind: Any) -> str:
    """A declared type in words, for a sentence: «a whole number», «one of a, b»."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of " + kind_name(get_args(kind)[0]).removeprefix("one of ")
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def parse(kind: Any, text: str) -> Any:
    """`text` as a value of the declared type `kind`; raises ValueError when it is none.

    Whole numbers may be written 1_000 or 1e6; lists by commas or spaces.
    """
    if get_origin(kind) is tuple:
        return tuple(parse(get_args(kind)[0], part) for part in text.replace(",", " ").split())
    value: Any = text
    if kind is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif kind is float:
        value = float(text)
    elif kind is int:
        try:
            value = int(text)
        except ValueError:
            number = float(text)
            value = int(number) if number.is_integer() else number
    if not fits(kind, value):
        raise ValueError(text)
    return value


def parse_mixture(text: str) -> list[tuple[int, dict[str, float]]]:
    """Weights by name, from each step on: "A=2, B=1, @100, B=1" is [(0, {…}), (100, {…})].

    Raises:
      ValueError: says what a mixture must be, as the end of a sentence.
    """
    stages: list[tuple[int, dict[str, float]]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.startswith("@"):
            if not part[1:].isdigit() or int(part[1:]) <= (stages[-1][0] if stages else -1):
                raise ValueError(f"{part!r} must be @STEP, later than the one before it")
            stages.append((int(part[1:]), {}))
            continue
        name, equals, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = -1.0
        if not equals or not 0 <= value < math.inf:
            raise ValueError(f"{part!r} must be SUBSET=WEIGHT, a weight of at least 0")
        if not stages:
            stages.append((0, {}))
        stages[-1][1][name.strip()] = value
    for step, weights in stages:
        if not sum(weights.values()) > 0:
            raise ValueError(f"the weights from step {step} on must have one above 0")
    if stages and stages[0][0] > 0:
        raise ValueError("it must say the weights of step 0 first")
    return stages


def fits(kind: Any, value: Any) -> bool:
    """Whether `value` is of the declared type; a whole number is also a number, and NaN is none."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(fits(get_args(kind)[0], v) for v in value)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return type(value) is kind


def show(value: Any) -> str:
    """A value as it is written in a shell."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return shlex.quote(str(value))
