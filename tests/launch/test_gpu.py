"""launch/gpu.sh on one host, and in a Slurm allocation."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.stand_in import ROOT, make_environment

# What Slurm does with a command: as many processes, each told its place.
SRUN = """
echo "srun $*"
for word in "$@"; do case $word in --ntasks=*) tasks=${word#*=} ;; esac; done
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@"; done
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The launcher with an environment whose `latte` says what it was called with."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", root / "launch")
    for path in (*ROOT.glob("requirements*.txt"), ROOT / "pyproject.toml"):
        shutil.copyfile(path, root / path.name)
    make_environment(root, 'echo "process ${SLURM_PROCID:-none}: latte $*"')
    for name, body in {"srun": SRUN, "nvidia-smi": 'exit "${GPU_STATUS:-0}"'}.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    return root


def gpu(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return subprocess.run(
        [checkout / "launch" / "gpu.sh", *arguments],
        env=plain | {"PATH": f"{checkout.parent}:{plain['PATH']}"} | environment,
        capture_output=True,
        text=True,
    )


def test_one_host(checkout):
    done = gpu(checkout, "--config", "latte_tiny", "--train.steps", "3")
    said = "process none: latte train --config latte_tiny --train.steps 3\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_a_process_for_each_gpu_of_a_slurm_allocation(checkout):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    done = gpu(checkout, "--config", "latte_tiny", **slurm)
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    flags = "--nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=1"
    for flag in (*flags.split(), "--export=ALL,LATTE_PROCESSES=auto"):
        assert flag in first.split()
    assert rest == [f"process {i}: latte train --config latte_tiny" for i in range(8)]
    dry = gpu(checkout, "--config", "latte_tiny", "--dry-run", **slurm)
    assert dry.stdout.splitlines()[0] == "make_environment requirements.txt requirements-cuda.txt"
    assert dry.stdout.splitlines()[1].replace("'", "") == first
    assert len(dry.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ("", {}, "--config is missing"),
        ("--config latte_tiny", {"GPU_STATUS": "9"}, "no NVIDIA GPU answers to `nvidia-smi -L`"),
        ("--config latte_tiny", {"SLURM_JOB_ID": "7"}, "the Slurm job 7 has no GPUs; ask for them"),
    ],
)
def test_bad_input_is_one_sentence(checkout, arguments, environment, words):
    done = gpu(checkout, *arguments.split(), **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("latte: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_help(checkout):
    done = gpu(checkout, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: launch/gpu.sh --config")
