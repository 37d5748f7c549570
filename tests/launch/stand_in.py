"""A stand-in for gcloud: queued resources whose hosts are folders of this machine.

Commands sent to a host are really run, in its folder, and a preemption really kills what runs
there. The state lies in the folder that STAND_IN names; `Cloud` is how tests read and change it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# What a test may set, with what holds where it does not.
SETTINGS: dict[str, Any] = {
    "account": "me@example.com",
    "project": "my-project",
    "zone": "my-zone-a",
    "buckets": ["gs://my-project-latte"],
    "hosts": 1,
    "delay": 0,  # looks at a queued resource before it is active
    "create_errors": [],  # what the next requests are refused with
    "failures": [],  # what the next requests fail with after they were accepted
    "ssh_failures": 0,  # connections that fail next
    "latte": "",  # what hosts have for `latte`; by default the real one, of the code sent there
}
_HOST = "STAND_IN_HOST"
"""In the environment of what runs on a host: the host's folder."""


class RefusalError(Exception):
    """What gcloud says when it fails."""


def make_environment(root: Path, latte: str = "") -> None:
    """Makes root/.venv look installed, around the Python that runs the tests."""
    venv = root / ".venv"
    (venv / "bin").mkdir(parents=True)
    for path in (*ROOT.glob("requirements*.txt"), ROOT / "pyproject.toml"):
        shutil.copyfile(path, venv / f"installed-{path.name}")
    real = f"PYTHONPATH={root}/src exec {sys.executable} -m latte"
    for name, body in {
        "python": f'exec {sys.executable} "$@"',
        "latte": latte or f'{real} "$@"',
    }.items():
        path = venv / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)


class Cloud:
    """The state of the stand-in, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict]:
        """Settings and resources, to read and to change by one process at a time."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "state.json"
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = {"resources": {}, "made": 0} | SETTINGS
            if path.exists():
                state = json.loads(path.read_text())
            try:
                yield state
            finally:
                path.write_text(json.dumps(state))

    # --- for tests -------------------------------------------------------------------------------

    def set(self, **settings: Any) -> None:
        assert settings.keys() <= SETTINGS.keys()
        with self._state() as state:
            state |= settings

    def calls(self) -> list[list[str]]:
        """Every command line that gcloud was given."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def count(self, *words: str) -> int:
        """Command lines that contain all words."""
        return sum(set(words) <= set(call) for call in self.calls())

    def hosts(self, name: str) -> list[Path]:
        """The home folders of the hosts of a slice that is there."""
        with self._state() as state:
            resource = state["resources"][name]
            return [self.folder / f"{resource['id']}-{i}" for i in range(state["hosts"])]

    def preempt(self, name: str) -> None:
        """Takes a slice back: no process on it lives on."""
        with self._state() as state:
            resource = state["resources"][name]
            resource |= {"states": ["SUSPENDING", "SUSPENDED"]}
            self._kill(resource)

    def resources(self) -> list[str]:
        with self._state() as state:
            return list(state["resources"])

    def close(self) -> None:
        """Ends whatever still runs on hosts."""
        with self._state() as state:
            for resource in state["resources"].values():
                self._kill(resource)

    def _kill(self, resource: dict) -> None:
        for process in processes(str(self.folder / resource["id"])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    # --- gcloud ----------------------------------------------------------------------------------

    def main(self, argv: list[str]) -> int:
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "calls", "a") as file:
            file.write(json.dumps(argv) + "\n")
        flags = dict(
            word.lstrip("-").split("=", 1) for word in argv if word.startswith("--") and "=" in word
        )
        words = [word for word in argv if not word.startswith("--")]
        try:
            match words:
                case ["auth", "list"]:
                    print(self._setting("account"))
                case ["config", "get-value", key]:
                    print(self._setting(key.split("/")[-1]))
                case ["storage", "ls", bucket]:
                    if bucket not in self._setting("buckets"):
                        raise RefusalError(f"{bucket} not found: 404.")
                case ["compute", "tpus", "queued-resources", verb, name]:
                    with self._state() as state:
                        getattr(self, verb)(state, name, flags, argv)
                case ["compute", "tpus", "tpu-vm", "scp", source, there]:
                    name, _, path = there.partition(":")
                    for host in self._reach(name, flags["worker"]):
                        shutil.copyfile(source, host / path)
                case ["compute", "tpus", "tpu-vm", "ssh", name]:
                    return self._ssh(self._reach(name, flags["worker"]), flags["command"])
                case _:
                    raise RefusalError(f"Invalid choice: {words}.")
        except RefusalError as error:
            print(f"ERROR: (gcloud.{'.'.join(words[:4])}) {error}", file=sys.stderr)
            return 255 if "port 22" in str(error) else 1
        return 0

    def _setting(self, key: str) -> Any:
        with self._state() as state:
            return state[key]

    def create(self, state: dict, name: str, flags: dict, argv: list[str]) -> None:
        assert {"node-id", "accelerator-type", "runtime-version", "zone", "project"} <= flags.keys()
        if state["create_errors"]:
            raise RefusalError(state["create_errors"].pop(0))
        if name in state["resources"]:
            raise RefusalError(f"ALREADY_EXISTS: Resource '{name}' already exists.")
        state["made"] += 1
        kind = flags["accelerator-type"]
        waiting = ["ACCEPTED", *["WAITING_FOR_RESOURCES"] * state["delay"], "PROVISIONING"]
        why = state["failures"].pop(0) if state["failures"] else ""
        states = [*waiting, "FAILED" if why else "ACTIVE"]
        resource = {"id": f"host{state['made']:03}", "kind": kind, "why": why, "states": states}
        state["resources"][name] = resource

    def describe(self, state: dict, name: str, flags: dict, argv: list[str]) -> None:
        resource = self._resource(state, name)
        if len(resource["states"]) > 1:
            resource["states"].pop(0)
        now = resource["states"][0]
        print(now, resource["kind"], resource["why"] if now == "FAILED" else "", sep="\t")
        if resource["states"] == ["ACTIVE"] and not resource.get("booted"):
            resource["booted"] = True
            for i in range(state["hosts"]):
                make_environment(self.folder / f"{resource['id']}-{i}" / "latte", state["latte"])

    def delete(self, state: dict, name: str, flags: dict, argv: list[str]) -> None:
        resource = self._resource(state, name)
        if resource["states"][0] == "ACTIVE" and "--force" not in argv:
            raise RefusalError("FAILED_PRECONDITION: it has nodes.")
        self._kill(resource)
        del state["resources"][name]

    def _resource(self, state: dict, name: str) -> dict:
        if name not in state["resources"]:
            raise RefusalError(f"NOT_FOUND: Resource 'projects/p/{name}' was not found")
        return state["resources"][name]

    def _reach(self, name: str, worker: str) -> list[Path]:
        with self._state() as state:
            if self._resource(state, name)["states"][0] != "ACTIVE":
                raise RefusalError("the TPU is in state PREEMPTED.")
            if state["ssh_failures"]:
                state["ssh_failures"] -= 1
                raise RefusalError("ssh: connect to host 10.0.0.1 port 22: Connection refused")
        hosts = self.hosts(name)
        return hosts if worker == "all" else [hosts[int(worker)]]

    def _ssh(self, hosts: list[Path], command: str) -> int:
        """Runs a command on hosts; like gcloud, it repeats one whose connection broke."""
        running = [(host, self._begin(host, command)) for host in hosts]
        worst = 0
        for host, process in running:
            status = process.wait()
            if status < 0 and not self._is_gone(host):
                status = self._begin(host, command).wait()
            worst = max(worst, status if status >= 0 else 255)
        return worst

    def _begin(self, host: Path, command: str) -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if k != "STAND_IN"}
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=host,
            env=environment | {"HOME": str(host), _HOST: str(host), "LATTE_PROCESSES": ""},
            stdin=subprocess.DEVNULL,
        )

    def _is_gone(self, host: Path) -> bool:
        with self._state() as state:
            return not any(
                host.name.startswith(resource["id"]) and resource["states"] == ["ACTIVE"]
                for resource in state["resources"].values()
            )


def processes(host: str, command: str = "") -> list[int]:
    """What runs on the hosts whose folder begins so, if its command line contains `command`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            on_it = f"{_HOST}={host}".encode() in (folder / "environ").read_bytes()
            if on_it and command.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(Cloud(Path(os.environ["STAND_IN"])).main(sys.argv[1:]))
