"""Tests run on the CPU, or on a GPU with JAX_PLATFORMS=cuda; shapes are checked at each call."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

# Meshes of one process: 8 devices of the CPU, of which a test without a mesh uses the first.
jax.config.update("jax_num_cpu_devices", 8)

# A shell's background job ignores this signal, and so would what the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test module imports the package, in every worker of pytest-xdist.
install_import_hook("latte", "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=5, help="disasters of tests/training/test_survival.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "error",
        # What other packages call or leave open is theirs to mend.
        "default::DeprecationWarning",
        "default::PendingDeprecationWarning",
        "default::ResourceWarning",
        "default::pytest.PytestUnraisableExceptionWarning",
        "error::DeprecationWarning:latte",
    ):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture
def x64():
    """Float64 for one test. It is off elsewhere, as in a run, so that dtypes must be explicit."""
    with jax.enable_x64(True):
        yield
