"""Rows spread over eight devices are the same rows: outputs, gradients, and what is exchanged."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from latte.ops.attention import attention
from latte.ops.conv import ConvState, conv
from latte.ops.latte import latte
from latte.ops.macchiato import macchiato
from latte.ops.rg_lru import RGLRUState, rg_lru
from latte.ops.segments import place
from tests.ops import helpers
from tests.ops.mixers import KINDS, Mixer

DEVICES, AXIS = 8, "context"
SHARE = 1e-2
"""As in test_mixers: gradients of logits may be zero but for their rounding."""

needs_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="too few devices")
pytestmark = needs_devices


def numbered(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Documents that end anywhere, where parts meet too, and one that is a whole row."""
    ends = rng.random((batch, length)) < rng.choice([0.0, 0.02, 0.3], (batch, 1))
    ends[0] = np.isin(np.arange(length), [length // DEVICES, length // 2, length // 2 + 1])
    ends[1] = False
    return np.cumsum(ends, axis=1).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """An op on arrays [B, T, …], parameters without T, and a state (None where it takes none)."""

    name: str
    op: Callable
    make: Callable[[np.random.Generator, int, int, np.ndarray, str], dict]

    def __call__(self, inputs: dict, **settings: Any) -> Any:
        given = inputs["arrays"] | inputs["parameters"]
        state = {} if inputs["state"] is None else {"state": inputs["state"]}
        return self.op(**given, segment_ids=inputs["segment_ids"], **state, **settings)[0]


def of_mixer(name: str, mixer: Mixer, *, state: bool = True) -> Case:
    def make(rng, batch, length, segment, kind):
        past = mixer.past(rng, segment, kind=kind) if state else None
        arrays = mixer.arrays(rng, batch, length, kind=kind)
        return {"arrays": arrays, "parameters": {}, "state": past}

    return Case(name, partial(mixer.op, **mixer.settings), make)


def make_rg_lru(rng, batch, length, segment, kind):
    kind = "mixed" if kind in ("rising", "ten thousand") else kind
    arrays = {name: rng.normal(size=(batch, length, 3)) for name in "xi"}
    arrays["r"] = helpers.logits(rng, kind, (batch, length, 3))
    h = np.where(segment[:, None] < 0, 0, rng.normal(size=(batch, 3)))
    return {
        "arrays": arrays,
        "parameters": {"lam": rng.normal(size=3)},
        "state": RGLRUState(h, segment),
    }


def make_conv(rng, batch, length, segment, kind):
    inputs = np.where(segment[:, None, None] < 0, 0, rng.normal(size=(batch, 3, 2)))
    return {
        "arrays": {"x": rng.normal(size=(batch, length, 2))},
        "parameters": {"weight": rng.normal(size=(4, 2))},
        "state": ConvState(inputs, segment),
    }


CASES = (
    of_mixer("latte", Mixer("latte", latte, "latte")),
    of_mixer("window", Mixer("window", attention, "attention", {"window": 5}, heads=4)),
    of_mixer("full", Mixer("full", attention, "attention", {"window": None}), state=False),
    of_mixer("macchiato", Mixer("macchiato", macchiato, "macchiato", {"window": 5}, heads=4)),
    Case("rg_lru", rg_lru, make_rg_lru),
    Case("conv", conv, make_conv),
)
all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def make(rng: np.random.Generator, case: Case, batch: int, length: int, kind: str) -> dict:
    ids = numbered(rng, batch, length)
    segment = np.where(rng.random(batch) < 0.5, 0, -1).astype(np.int32)
    return {"segment_ids": ids} | case.make(rng, batch, length, segment, kind)


def spread(case: Case, **settings: Any) -> Callable[[dict], jax.Array]:
    """The op with T over eight devices."""
    mesh = Mesh(np.asarray(jax.devices()[:DEVICES]), (AXIS,))
    row, whole = PartitionSpec(None, AXIS), PartitionSpec()
    specs = {"segment_ids": row, "arrays": row, "parameters": whole, "state": whole}

    def run(inputs: dict) -> jax.Array:
        f = jax.shard_map(
            lambda inputs: case(inputs, axis=AXIS, **settings),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=row,
            check_vma=False,
        )
        return f(inputs)

    return run


@all_cases
def test_parts_are_the_definition_of_the_whole(case):
    rng = np.random.default_rng(0)
    check = helpers.comparison(
        spread(case, impl="xla"), lambda inputs: case(inputs, impl="reference"), share=SHARE
    )
    for kind in KINDS:
        check(make(rng, case, 4, DEVICES * 6, kind))


def exchanged(f: Callable, *args: Any) -> dict[str, int]:
    """Bytes of the results of each kind of collective in the compiled program."""
    found: dict[str, int] = {}
    collectives = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    pattern = rf"= (.*?) ({collectives})(?:-start)?\("
    for types, kind in re.findall(pattern, jax.jit(f).lower(*args).compile().as_text() or ""):
        for item, dimensions in re.findall(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]", types):
            size = np.prod([int(d) for d in dimensions.split(",") if d], dtype=int)
            found[kind] = found.get(kind, 0) + int(size) * (1 if item == "pred" else 4)
    return found


@all_cases
def test_what_is_exchanged_does_not_grow_with_the_row(case):
    rng = np.random.default_rng(1)

    def gradients(inputs: dict) -> Any:
        def total(arrays: dict, parameters: dict) -> jax.Array:
            given = inputs | {"arrays": arrays, "parameters": parameters}
            return jnp.sum(spread(case, impl="xla")(given) ** 2)

        return jax.grad(total, argnums=(0, 1))(inputs["arrays"], inputs["parameters"])

    short, long = (
        exchanged(gradients, helpers.to(make(rng, case, 2, DEVICES * t, "normal"), jnp.float32))
        for t in (8, 64)
    )
    assert short["collective-permute"] > 0
    if case.name == "full":
        short.pop("all-gather"), long.pop("all-gather")
        # The gradients of what was gathered come back reduced.
        short.pop("reduce-scatter", 0), long.pop("reduce-scatter", 0)
    assert short == long


def test_places_are_those_of_the_whole_row():
    rng = np.random.default_rng(2)
    mesh = Mesh(np.asarray(jax.devices()[:DEVICES]), (AXIS,))
    row = PartitionSpec(None, AXIS)
    parts = jax.jit(
        jax.shard_map(
            partial(place, axis=AXIS), mesh=mesh, in_specs=row, out_specs=row, check_vma=False
        )
    )
    for _ in range(5):
        ids = numbered(rng, 4, DEVICES * 5)
        numbers, positions = parts(ids)
        first = np.diff(ids, axis=1, prepend=-1) != 0
        at = np.arange(ids.shape[1])
        np.testing.assert_array_equal(numbers, np.cumsum(first, axis=1))
        expected = at - np.maximum.accumulate(np.where(first, at, 0), axis=1)
        np.testing.assert_array_equal(positions, expected)
        for whole, part in zip(place(jnp.asarray(ids)), (numbers, positions), strict=True):
            np.testing.assert_array_equal(whole, part)


@pytest.mark.parametrize(
    ("case", "length", "words"),
    [(CASES[1], 2, "reaches 4 tokens back"), (CASES[5], 2, "reaches 3 tokens back")],
    ids=("window", "conv"),
)
def test_a_part_that_is_shorter_than_the_reach_is_refused(case, length, words):
    inputs = make(np.random.default_rng(3), case, 2, DEVICES * length, "normal")
    with pytest.raises(ValueError, match=words):
        spread(case)(helpers.to(inputs, jnp.float32))


def test_an_op_over_devices_wants_its_documents():
    inputs = make(np.random.default_rng(4), CASES[0], 2, DEVICES, "normal")
    with pytest.raises(ValueError, match="needs segment_ids"):
        spread(CASES[0])(helpers.to(inputs, jnp.float32) | {"segment_ids": None})
