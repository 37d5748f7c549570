"""Runs whose directory is at a URL."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.training.tiny import ENVIRONMENT, same_run


def latte(where, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "latte", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, env=ENVIRONMENT)


def hosts(tmp_path):
    """Working directories of hosts that share nothing."""
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        yield tmp_path / name


def test_a_run_goes_on_from_a_url_on_a_host_that_is_new(tiny, whole, tmp_path):
    url, there = f"file://{tmp_path}/bucket/run", tmp_path / "bucket" / "run"
    first, second, third = hosts(tmp_path)
    arguments = [*tiny.arguments(there)[:3], "--run-dir", url]
    # The schedule is of the whole run: the first host is lost in the middle of it.
    process = subprocess.Popen(
        [sys.executable, "-m", "latte", *arguments], cwd=first, env=ENVIRONMENT
    )
    while not (there / "checkpoints" / "25").exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    shutil.rmtree(first)
    done = latte(second, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    same_run(there, whole)
    assert (there / "plots" / "loss.png").exists()
    assert not list(second.rglob("checkpoints/*"))
    values = json.loads(latte(third, "eval", "--run", url, "--json").stdout)
    assert values["step"] == 60


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param(
            "gs://bucket/run",
            "gcsfs",
            marks=pytest.mark.skipif(bool(find_spec("gcsfs")), reason="gcsfs is installed"),
        ),
        ("nothing://bucket/run", "the run directory nothing://bucket/run cannot be reached"),
    ],
)
def test_a_url_that_cannot_be_reached_is_named(tiny, tmp_path, url, words):
    done = latte(tmp_path, *tiny.arguments(tmp_path)[:3], "--run-dir", url)
    assert done.returncode == 2
    [said] = done.stderr.splitlines()
    assert said.startswith("latte: ")
    assert words in said
    assert not os.path.exists(tmp_path / "runs")
