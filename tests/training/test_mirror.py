"""Runs whose directory is at a URL."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.training.bucket import NAME
from tests.training.pod import free_port, start
from tests.training.test_processes import same_losses
from tests.training.tiny import ENVIRONMENT, same_run


def latte(where, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "latte", *arguments]
    environment = ENVIRONMENT | environment
    return subprocess.run(command, cwd=where, capture_output=True, text=True, env=environment)


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


@pytest.fixture
def bucket():
    """The address of a bucket that another process serves."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    server = subprocess.Popen([sys.executable, "-m", "tests.training.bucket", str(port)])
    until = time.monotonic() + 60
    while True:
        try:
            objects(address)
            break
        except URLError:
            assert time.monotonic() < until
            time.sleep(0.1)
    yield address
    server.kill()
    server.wait()


def objects(address: str, prefix: str = "") -> list[str]:
    """Names of what is in the bucket."""
    with urlopen(f"{address}/storage/v1/b/{NAME}/o?prefix={prefix}") as answer:
        return [item["name"] for item in json.load(answer)["items"]]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("gcsfs"), reason="needs gcsfs")
def test_a_pod_writes_to_a_bucket_and_another_host_goes_on(tiny, whole, tmp_path, bucket):
    """Two hosts are lost together in the middle of a run; a third goes on alone."""
    url = f"gs://{NAME}/runs/one"
    storage = {
        "STORAGE_EMULATOR_HOST": bucket,
        "TENSORSTORE_GCS_HTTP_URL": bucket,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }
    pod = start(tiny, tmp_path / "run", 2, "--mesh.fsdp", "4", "--run-dir", url, apart=storage)
    until = time.monotonic() + 400
    # What Orbax writes last into a checkpoint.
    while "runs/one/checkpoints/15/commit_success.txt" not in objects(bucket, "runs/one/check"):
        assert time.monotonic() < until, pod.error(0)
        assert all(process.poll() is None for process in pod.processes), pod.error(0)
        time.sleep(0.2)
    pod.end()
    third = tmp_path / "third"
    third.mkdir()
    arguments = [*tiny.arguments(tmp_path)[:3], "--run-dir", url]
    done = latte(third, *arguments, **storage)
    assert done.returncode == 0, done.stderr
    [copy] = (third / ".cache/latte/runs").iterdir()
    same_losses(copy, whole)
    assert not (copy / "checkpoints").exists()
    assert "runs/one/plots/loss.png" in objects(bucket)
    assert f"all 60 steps of {url} are done" in latte(third, *arguments, **storage).stdout


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
