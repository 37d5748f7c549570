"""What a run ran on and with, for its environment.json."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = [
    "latte-lm",
    "jax",
    "jaxlib",
    "libtpu",
    "equinox",
    "optax",
    "grain",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "sentencepiece",
]


def describe() -> dict[str, Any]:
    """Versions, git state, devices, command line and date of this process."""
    import jax

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": _versions(),
        "git": _git(Path(__file__).parent),
        "processes": jax.process_count(),
        "devices": len(jax.devices()),
        "device_kind": jax.devices()[0].device_kind,
    }


def append(path: Path) -> None:
    """Adds this process to environment.json: a list, since a run may go on elsewhere."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # absent, or torn by a kill
        before = []
    path.write_text(json.dumps([*before, describe()], indent=2) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout around `folder`, and whether files differ; None outside one.

    What a launcher sent to another machine is no checkout, but brings that of the one it was.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "environment.py")  # another repository may be around us
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        sent = folder.parents[1] / "launched" / "git.json"
        return json.loads(sent.read_text(encoding="utf-8")) if sent.exists() else None
