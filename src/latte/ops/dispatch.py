"""Which implementation of an op runs; the only file that may ask which platform this is."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

import jax
from jaxtyping import Array

_log = logging.getLogger(__name__)
_target: ContextVar[str | None] = ContextVar("target", default=None)


def choose(
    op: str,
    impl: str | None,
    available: Mapping[str, Callable],
    kernels: Mapping[str, Callable] | None = None,
    *,
    fits: bool | Mapping[str, bool] = True,
    native: Mapping[str, str] | None = None,
) -> Callable:
    """The implementation named, or the best one where None is asked for.

    Args:
        op: what is chosen for, in messages.
        impl: a name in `available`, "pallas", or None.
        available: implementations that run anywhere.
        kernels: Pallas kernels by platform.
        fits: whether the kernels take these arrays, by platform where it is not the same for all;
            where they do not, None falls back to XLA.
        native: by platform the name of a form that comes before the kernels, where it is available.
            It is of a library of the device's, so only on the device itself.

    Raises:
        ValueError: no implementation has that name; one asked for never gives way to another.
    """
    kernels = kernels or {}
    here = platform()
    fits = fits if isinstance(fits, bool) else fits.get(here, False)
    if impl is None:
        impl = "pallas" if here in kernels and fits else "xla"
        own = (native or {}).get(here, impl)
        if own in available and here == jax.default_backend():
            impl = own
        if here in kernels:
            _say(op, impl, here)
    if impl in available:
        return available[impl]
    names = sorted([*available, *(["pallas"] if kernels else [])])
    if impl != "pallas" or not kernels:
        raise ValueError(f"{op} has no implementation {impl!r}: choose from {names}")
    if here not in kernels:
        raise ValueError(f"{op} has Pallas kernels for {sorted(kernels)} and this is {here!r}")
    if not fits:
        raise ValueError(f"the Pallas kernel of {op} does not take arrays of these types and sizes")
    return kernels[here]


@functools.cache
def _say(op: str, impl: str, where: str) -> None:
    """Says once what was chosen."""
    names = {"pallas": "its Pallas kernel", "xla": "XLA", "cudnn": "cuDNN"}
    _log.info("%s: %s on %s", op, names[impl], where)


def by_platform(default: Callable[..., Array], *arrays: Array, **forms: Callable) -> Array:
    """Applies the form of the platform that the program is compiled for, `default` elsewhere.

    The choice is made when a program is lowered, so that one compiled here for another machine
    gets that machine's form.
    """
    return jax.lax.platform_dependent(*arrays, default=default, **forms)


def platform() -> str:
    """The platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Has programs that are traced meanwhile take another platform's kernels, to be compiled for it
    ahead of time."""
    before = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(before)
