"""A checkout whose launchers meet stand-ins: a gcloud, and environments that are there already."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.stand_in import ROOT, Cloud, make_environment
from tests.training.conftest import tiny as tiny

# The checkout's own `latte`, of which launch/tpu.sh only needs the plan.
PLAN = """
echo "$*" >>"$PLAN_CALLS"
echo "the plan"
[ -z "${PLAN_ERROR:-}" ] || echo "latte: $PLAN_ERROR" >&2
exit "${PLAN_STATUS:-0}"
"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of this repository's files, tracked by a git of its own."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("src", "configs", "data", "launch"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("requirements*.txt"), *ROOT.glob("*.toml"), ROOT / ".gitignore"):
        shutil.copyfile(path, root / path.name)
    make_environment(root, PLAN)
    me = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    for command in (["init", "-q"], ["add", "."], [*me, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


class Launcher:
    """launch/tpu.sh of the checkout, and the cloud that it talks to."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout, self.folder = checkout, folder
        self.cloud = Cloud(folder / "cloud")
        self.bucket = folder / "bucket"
        self.plan_calls = folder / "plan_calls"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.started: list[subprocess.Popen] = []
        script = ROOT / "tests" / "launch" / "stand_in.py"
        (self.bin / "gcloud").write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
        (self.bin / "gcloud").chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        """Begins `launch/tpu.sh ARGUMENTS`, in a process group of its own."""
        paths = [str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        process = subprocess.Popen(
            [self.checkout / "launch" / "tpu.sh", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ
            | {
                "PATH": ":".join(paths),
                "STAND_IN": str(self.cloud.folder),
                "PLAN_CALLS": str(self.plan_calls),
                "LATTE_POLL_SECONDS": "0.2",
                "LATTE_RETRY_SECONDS": "0.05",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            | environment,
        )
        self.started.append(process)
        return process

    def options(self, config: str = "latte_tiny") -> list[str]:
        return ["--config", config, "--tpu", "v5litepod-4", "--bucket", str(self.bucket)]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """A whole call."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self) -> None:
        """Ends what a test left running."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self.cloud.close()


@pytest.fixture
def launcher(checkout, tmp_path) -> Iterator[Launcher]:
    launcher = Launcher(checkout, tmp_path)
    yield launcher
    launcher.close()
