"""The tiny run of these tests, and one of it that nothing disturbed."""

import os
from pathlib import Path

import pytest

from tests.training.pod import Pod, start
from tests.training.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # all workers find what one has compiled
    return make_tiny(tmp_path_factory.mktemp("tiny"), shared / "latte_cache")


@pytest.fixture(scope="session")
def whole(tiny) -> Path:
    """The run that was never stopped; its clean stderr is whole.err."""
    run_dir = tiny.folder / "whole"
    tiny.train(run_dir).ok()
    return run_dir


@pytest.fixture
def pods():
    """Starts runs, and ends what is left of them."""
    started: list[Pod] = []

    def begin(*arguments, **own) -> Pod:
        started.append(start(*arguments, **own))
        return started[-1]

    yield begin
    for pod in started:
        pod.end()
