"""Disks that are full."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, megabytes: int) -> Iterator[Path]:
    """A disk of this size at `place`; skips the test where nothing may be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int = 0) -> None:
    """Takes all room on a disk but `leave` bytes."""
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while shutil.disk_usage(place).free > leave:
            file.write(b"\0" * 4096)
