"""What the tests of all ops share: documents, hard inputs, errors, gradients, splits, and sizes."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import topologies

from latte.plan.build import NO_TPU

HARD = ("zero", "normal", "large", "jumps", "rising", "mixed")
"""Kinds of logits that `logits` makes; all are finite."""


def shapes(length: int = 70, width: int = 5) -> st.SearchStrategy[tuple[int, int, int]]:
    """(B, T, W) with T from 1, and lengths about powers of two, where chunks end, well covered."""
    lengths = st.integers(1, length) | st.sampled_from(
        [t for p in (4, 8, 16, 32, 64, 128) for t in (p - 1, p, p + 1) if t <= length]
    )
    return st.tuples(st.integers(1, 3), lengths, st.integers(1, width))


seeds = st.integers(0, 2**32 - 1)


def segments(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Segment ids [B, T] of documents that end anywhere: none or many ends, ids that come back."""
    ends = rng.random((batch, length)) < rng.choice([0.0, 0.05, 0.3, 1.0], (batch, 1))
    ids = rng.integers(0, 3, (batch, 1)) + np.cumsum(ends, axis=1)
    return np.where(rng.random((batch, 1)) < 0.5, ids % 3, ids).astype(np.int32)


def logits(rng: np.random.Generator, kind: str, shape: Sequence[int], axis: int = 1) -> np.ndarray:
    """Float64 logits of a kind in HARD; `axis` is time."""
    z = rng.normal(size=shape)
    if kind == "zero":
        return np.zeros(shape)
    if kind == "large":
        return 1e4 * np.sign(z)
    if kind == "jumps":
        return z + rng.choice([-1e4, 0, 0, 1e4], shape)
    if kind == "rising":
        steps = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        return z + 50.0 * steps
    if kind == "mixed":
        return z * 10.0 ** rng.integers(-2, 3, shape)
    return z


def to(tree: Any, dtype: Any) -> Any:
    """A tree of arrays on the device, floating ones as `dtype`."""

    def move(z):
        z = np.asarray(z)
        return jnp.asarray(z, dtype) if jnp.issubdtype(z.dtype, jnp.floating) else jnp.asarray(z)

    return jax.tree.map(move, tree)


def norm(z: Any) -> float:
    """Euclidean norm; scaled before squaring, so that neither huge nor tiny values overflow."""
    z = np.asarray(z, np.float64)
    scale = np.abs(z).max(initial=0.0) or 1.0
    return float(scale * np.linalg.norm(z / scale))


def error(actual: Any, expected: Any, floor: float = 0.0) -> float:
    """Norm of the difference over norm of `expected`, or over `floor` where that is larger.

    Over 1 where both are 0; inf if anything is not finite.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert a.shape == e.shape, (a.shape, e.shape)
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return float("inf")
    return norm(a - e) / (max(norm(e), floor) or 1.0)


def assert_close(actual: Any, expected: Any, tolerance: float, floor: float = 0.0) -> None:
    """Every leaf of two trees agrees, as `error` measures it; the message names the leaf."""
    paths, structure = jax.tree_util.tree_flatten_with_path(actual)
    leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for (path, a), e in zip(paths, leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating):
            np.testing.assert_array_equal(a, e, err_msg=name)
        else:
            off = error(a, e, floor)
            assert off <= tolerance, f"{name}: {off:.2e} > {tolerance:.0e}"


def outputs_and_gradients(
    f: Callable[[Any], Any], seed: int = 0
) -> Callable[[Any], tuple[Any, list[jax.Array]]]:
    """Compiles inputs → (f(inputs), the gradients of a random weighting of all floating outputs).

    `inputs` is a tree of arrays; its floating leaves are those differentiated (a state's too), and
    their gradients come in its order. The weights are the same for equal seeds and output shapes.
    """

    def floating(leaf):
        return jnp.issubdtype(leaf.dtype, jnp.floating)

    def weighted(differentiated, others, structure):
        rest, others = iter(differentiated), iter(others)
        leaves = [next(rest) if d else next(others) for d in structure[1]]
        out = f(jax.tree.unflatten(structure[0], leaves))
        rng = np.random.default_rng(seed)
        total = jnp.zeros(())
        for z in jax.tree.leaves(out):
            cotangent = rng.normal(size=z.shape)
            if floating(z):
                total = total + jnp.sum(z * jnp.asarray(cotangent, z.dtype)).astype(total.dtype)
        return total, out

    compiled = jax.jit(jax.grad(weighted, has_aux=True), static_argnums=2)

    def run(inputs):
        leaves, structure = jax.tree.flatten(inputs)
        differentiated = [leaf for leaf in leaves if floating(leaf)]
        others = [leaf for leaf in leaves if not floating(leaf)]
        gradients, out = compiled(differentiated, others, (structure, tuple(map(floating, leaves))))
        return out, gradients

    return run


def comparison(
    f: Callable[[Any], Any],
    definition: Callable[[Any], Any],
    *,
    exact: float = 1e-9,
    single: float = 1e-4,
    share: float = 0.0,
) -> Callable[[Any], None]:
    """A check that f is its definition on a tree of NumPy arrays, outputs and every gradient.

    In float64 to `exact`, and in float32 against the float64 definition on the same float32 inputs
    to `single`. Inputs of equal shapes share one compilation. Errors of gradients are measured
    against at least this share of the largest one: give it where some are zero but for rounding.
    """
    actual, expected = outputs_and_gradients(f), outputs_and_gradients(definition)

    def agree(actual, expected, tolerance):
        assert_close(actual[0], expected[0], tolerance)
        floor = share * max(map(norm, expected[1]))
        assert_close(actual[1], expected[1], tolerance, floor)

    def check(inputs):
        narrow = to(inputs, jnp.float32)
        with jax.enable_x64(True):
            wide = to(inputs, jnp.float64)
            agree(actual(wide), expected(wide), exact)
            narrow_expected = expected(to(narrow, jnp.float64))
        agree(actual(narrow), narrow_expected, single)

    return check


def split_points(rng: np.random.Generator, length: int) -> list[tuple[int, int]]:
    """[start, end) of consecutive pieces of a sequence, of few lengths (each compiles)."""
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + int(rng.choice([1, 2, 3, 5, 8]))))
    return list(pairwise(ends))


def in_pieces(
    f: Callable[..., tuple[Any, Any]],
    sequences: Any,
    segment_ids: Any,
    state: Any,
    points: Sequence[tuple[int, int]],
) -> tuple[Any, Any]:
    """(y, state) of f(sequences, segment_ids, state) called piece by piece with its state carried.

    `sequences` is a tree of arrays [B, T, …]. Give a jitted f: pieces of equal lengths then share a
    compilation.
    """
    ys = []
    for start, end in points:
        piece = jax.tree.map(lambda z: z[:, start:end], sequences)  # noqa: B023
        y, state = f(piece, segment_ids[:, start:end], state)
        ys.append(y)
    return jnp.concatenate(ys, axis=1), state


def assert_no_leak(
    f: Callable[[Any], jax.Array],
    sequences: Any,
    segment_ids: Any,
    *,
    causal: bool = True,
    local: Sequence[str] = (),
) -> None:
    """By gradient: exactly zero from a token to those of other documents and, where causal, to
    later ones; and from each token to itself not zero.

    `f` maps a tree of floating arrays [B, T, …] to y [B, T, …]. The arrays named in `local`, such
    as queries, reach no other token at all.
    """
    ids = np.asarray(segment_ids)
    run = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    length = ids.shape[1]

    def total(t, tree):
        y = f(tree)
        return jnp.sum(jax.lax.dynamic_index_in_dim(y, t, 1) ** 2)

    by_output = jax.jit(jax.vmap(jax.grad(total, argnums=1), (0, None)))
    t, s = np.arange(length)[:, None, None], np.arange(length)
    visible = run.T[:, :, None] == run
    if causal:
        visible &= s <= t
    anywhere = np.zeros((length, *ids.shape), bool)
    gradients = by_output(jnp.arange(length), sequences)
    for path, g in jax.tree_util.tree_leaves_with_path(gradients):
        name, g = jax.tree_util.keystr(path, simple=True), np.asarray(g)
        assert np.isfinite(g).all(), name
        reached = (g != 0).reshape(*g.shape[:3], -1).any(-1)
        wrong = reached & ~(visible & (s == t) if name in local else visible)
        assert not wrong.any(), (name, np.argwhere(wrong)[:5])
        anywhere |= reached
    assert anywhere[np.arange(length), :, np.arange(length)].all()


def array_sizes(f: Callable[..., Any], *args: Any) -> set[int]:
    """Element counts of all arrays in f's jaxpr, inner ones included, and in its compiled HLO."""
    sizes = traced_sizes(f, *args)
    hlo = jax.jit(f).lower(*args).compile().as_text()
    assert hlo is not None
    for dimensions in re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", hlo):
        sizes.add(int(np.prod([int(d) for d in dimensions.split(",")])))
    return sizes


def traced_sizes(f: Callable[..., Any], *args: Any) -> set[int]:
    """Element counts of all arrays in f's jaxpr, inner ones included; compiles nothing."""
    return set(_jaxpr_sizes(jax.make_jaxpr(f)(*args).jaxpr))


def _jaxpr_sizes(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "size", 0)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _jaxpr_sizes(inner)


def tpu(monkeypatch: pytest.MonkeyPatch, topology: str) -> Any:
    """A chip of a slice, to compile for with no TPU; the test is skipped without the compiler."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    for name, value in NO_TPU.items():
        monkeypatch.setenv(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
