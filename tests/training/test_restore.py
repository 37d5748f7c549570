"""Checkpoints are restored straight into the parts that each process holds."""

import json
import os
import subprocess
import sys

import pytest

from tests.training.pod import free_port
from tests.training.restoring import WHOLE


def begin(action: str, folder, devices: int, count: int = 1) -> list[subprocess.Popen]:
    port = free_port()
    command = [sys.executable, "-m", "tests.training.restoring", action, str(folder)]
    shared = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if count > 1:
        shared |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | shared | {"JAX_PROCESS_ID": str(i)},
        )
        for i in range(count)
    ]


def restore(folder, devices: int, count: int) -> list[dict]:
    """What each process says."""
    started = begin("restore", folder, devices, count)
    said = [json.loads(p.communicate(timeout=600)[0].splitlines()[-1]) for p in started]
    assert all(one["right"] and one["held"] == WHOLE / count for one in said)
    return said


@pytest.mark.slow
def test_no_process_holds_more_than_its_part(tmp_path):
    """Of 512 MB that one device wrote each of four processes takes a quarter, in memory too.

    Reading needs room beside what is read: so much the less as the part is smaller.
    """
    folder = tmp_path / "checkpoints"
    [saved] = begin("save", folder, 1)
    assert saved.wait(600) == 0
    [whole] = restore(folder, 4, 1)
    for part in restore(folder, 1, 4):
        assert part["peak"] < 0.75 * WHOLE
        assert part["peak"] < 0.4 * whole["peak"]
