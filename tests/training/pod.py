"""The processes of one run on this machine, as the hosts of a pod would run them."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from latte.metrics import read_metrics
from tests.training.tiny import ENVIRONMENT, Done, Tiny

DEVICES = 2
"""Of each process."""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@dataclass
class Pod:
    """Runs of one command by several processes; what they say goes to run_dir.N.err."""

    run_dir: Path
    processes: list[subprocess.Popen] = field(default_factory=list)

    def error(self, process: int) -> str:
        return Path(f"{self.run_dir}.{process}.err").read_text()

    def wait(self, process: int, seconds: float = 600) -> Done:
        started = self.processes[process]
        started.wait(timeout=seconds)
        out = Path(f"{self.run_dir}.{process}.out").read_text()
        return Done(started.returncode, out, self.error(process))

    def all_ok(self) -> None:
        for process in range(len(self.processes)):
            self.wait(process).ok()

    def wait_for_step(self, step: int) -> None:
        """Returns when a step is reported, which is some steps after it was taken."""
        until = time.monotonic() + 600
        path = self.run_dir / "metrics.jsonl"
        while not path.exists() or not any(r["step"] >= step for r in read_metrics(path)):
            ended = [p.returncode for p in self.processes if p.poll() is not None]
            assert not ended, (ended, [self.error(i) for i in range(len(self.processes))])
            assert time.monotonic() < until
            time.sleep(0.02)

    def send(self, process: int, kind: signal.Signals) -> None:
        os.kill(self.processes[process].pid, kind)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def start(
    tiny: Tiny,
    run_dir: Path,
    count: int,
    *settings: str,
    apart: dict[str, str] | None = None,
    **own: list[str],
) -> Pod:
    """Begins a run of `count` processes; `own` gives settings of single ones, as p0=[…].

    With `apart`, more of the environment, each works in a folder of its own, as hosts do.
    """
    address, pod = f"127.0.0.1:{free_port()}", Pod(run_dir)
    for i in range(count):
        folder = Path(f"{run_dir}.host{i}") if apart else None
        if folder is not None:
            folder.mkdir(exist_ok=True)
        environment = {
            **(apart or {}),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(i),
        }
        arguments = tiny.arguments(run_dir, *settings, *own.get(f"p{i}", []))
        with open(f"{run_dir}.{i}.out", "w") as out, open(f"{run_dir}.{i}.err", "w") as errors:
            pod.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "latte", *arguments],
                    stdout=out,
                    stderr=errors,
                    env=ENVIRONMENT | environment,
                    cwd=folder,
                )
            )
    return pod
