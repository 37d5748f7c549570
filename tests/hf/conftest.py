"""Folders of random weights, one of every model, and a run that was trained."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.hf.folders import Folder
from tests.training.tiny import Tiny, make_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _modules(tmp_path_factory):
    """Keeps the code that transformers copies from folders out of the user's cache."""
    import transformers.dynamic_module_utils as dynamic

    before, dynamic.HF_MODULES_CACHE = dynamic.HF_MODULES_CACHE, str(tmp_path_factory.mktemp("hf"))
    yield
    dynamic.HF_MODULES_CACHE = before


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Callable[[str], Folder]:
    """The folder of a model of `tests.hf.folders`, made once."""
    made: dict[str, Folder] = {}

    def of(name: str) -> Folder:
        if name not in made:
            made[name] = Folder.make(tmp_path_factory.mktemp("folders") / "out", name)
        return made[name]

    return of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def trained(tiny) -> Path:
    """A run of sixty steps."""
    run_dir = tiny.folder / "run"
    tiny.train(run_dir).ok()
    return run_dir
