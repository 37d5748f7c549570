"""A TPU slice that is held through a queued resource: its life, and how its hosts are reached."""

import contextlib
import os
import re
import shlex
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import NamedTuple

import slices
from gcloud import (
    ATTEMPTS,
    POLL,
    Done,
    LaunchError,
    not_found,
    patiently,
    pause,
    refuse_login,
    run,
    say,
    wait,
)

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "launch"
_HOST = "latte/launch/tpu_host.sh"
_ARCHIVE = "latte.tar.gz"

# To a host that has gone away no connection is waited for, and one that is open soon ends.
_IMPATIENCE = ["-oConnectTimeout=30", "-oServerAliveInterval=30"]


# What may stay from one sync to the next: the environment and prepared corpora.
_UNPACK = (
    f"if [ -e {_HOST} ]; then bash {_HOST} stop 30; fi && mkdir -p latte"
    " && find latte -mindepth 1 -maxdepth 1 ! -name .venv ! -name .cache -exec rm -rf {} +"
    f" && tar -xzf {_ARCHIVE} -C latte && bash {_HOST} install"
)

_MEANING = {
    "ACCEPTED": "the request is accepted",
    "WAITING_FOR_RESOURCES": "in the queue, until the zone has room",
    "CREATING": "the request is being made",
    "PROVISIONING": "its hosts are being set up",
    "ACTIVE": "ready",
    "SUSPENDING": "preempted, its hosts are being taken away",
    "SUSPENDED": "preempted",
    "FAILED": "the request failed",
    "DELETING": "being deleted",
}


class LostError(Exception):
    """The slice is no longer there."""


class State(NamedTuple):
    """A queued resource's state, "" where there is none, and why it failed."""

    name: str
    why: str = ""


class Report(NamedTuple):
    """What a host says of its run: see tpu_host.sh."""

    word: str
    lines: int
    arguments: str


@dataclass(frozen=True)
class Pod:
    """A queued resource and the one slice in it, which share a name.

    `provisioning` is --spot, --reserved, or "" for on demand.
    """

    name: str
    accelerator: str
    zone: str
    project: str
    provisioning: str

    # --- commands --------------------------------------------------------------------------------

    def _queued(self, verb: str, *flags: str) -> list[str]:
        place = [f"--zone={self.zone}", f"--project={self.project}", "--quiet"]
        return ["gcloud", "compute", "tpus", "queued-resources", verb, self.name, *place, *flags]

    def _hosts(self, verb: str, worker: str, *words: str) -> list[str]:
        place = [f"--zone={self.zone}", f"--project={self.project}", "--quiet"]
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, *words, *place, f"--worker={worker}"]

    @property
    def create_command(self) -> list[str]:
        return self._queued(
            "create",
            f"--node-id={self.name}",
            f"--accelerator-type={self.accelerator}",
            f"--runtime-version={slices.runtime_version(self.accelerator)}",
            *filter(None, [self.provisioning]),
        )

    @property
    def describe_command(self) -> list[str]:
        kind = "tpu.nodeSpec[0].node.acceleratorType"
        fields = f"state.state,{kind},state.failedData.error.message"
        return self._queued("describe", f"--format=value({fields})")

    @property
    def delete_command(self) -> list[str]:
        return self._queued("delete", "--force")

    def copy_command(self, archive: str) -> list[str]:
        there = f"{self.name}:{_ARCHIVE}"
        flags = [f"--scp-flag={flag}" for flag in _IMPATIENCE]
        return self._hosts("scp", "all", archive, there, *flags)

    def ssh_command(self, worker: str, command: str) -> list[str]:
        flags = [f"--ssh-flag={flag}" for flag in _IMPATIENCE]
        return [*self._hosts("ssh", worker, self.name, *flags), f"--command={command}"]

    def unpack_command(self) -> list[str]:
        return self.ssh_command("all", _UNPACK)

    def start_command(self, arguments: list[str]) -> list[str]:
        return self.ssh_command("all", shlex.join(["bash", _HOST, "start", *arguments]))

    def stop_command(self) -> list[str]:
        return self.ssh_command("all", f"if [ -e {_HOST} ]; then bash {_HOST} stop 300; fi")

    def status_command(self, worker: str) -> list[str]:
        command = f"if [ -e {_HOST} ]; then bash {_HOST} status; else echo none 0; fi"
        return self.ssh_command(worker, command)

    def follow_command(self, line: int) -> list[str]:
        return self.ssh_command("0", f"bash {_HOST} follow {line}")

    @property
    def given_back(self) -> Path:
        """Is there once --delete was called, so that no other call asks for the slice again."""
        return CACHE / f"{self.name}.deleted"

    # --- the queued resource ---------------------------------------------------------------------

    def state(self) -> State:
        """Where the queued resource stands.

        Raises:
            LaunchError: it holds another slice than the one that is asked for.
        """
        done = patiently(self.describe_command, f"asking for the state of {self.name}")
        if not_found(done):
            return State("")
        name, kind, why = f"{done.out.strip()}\t\t".split("\t")[:3]
        if self.accelerator and kind not in ("", self.accelerator):
            raise LaunchError(
                f"{self.name} in {self.zone} is a {kind}, not a {self.accelerator}; give it back "
                "first, with --delete, or take another --name",
                2,
            )
        return State(name, " ".join(why.split()))

    def acquire(self) -> None:
        """Returns once the slice is there; asks for it where it is not, or no longer.

        Raises:
            LaunchError: it is refused, requests fail one after the other, or it was given back.
        """
        shown, asked, failures = State(""), False, 0
        self._refuse_given_back()
        while (state := self.state()).name != "ACTIVE":
            self._refuse_given_back()
            if state not in (shown, State("")):
                self._show(state)
            shown = state
            if not state.name:
                asked, why = True, self._create()
                failures += self._failed(why, failures) if why else 0
            elif state.name in ("SUSPENDED", "FAILED"):
                self.delete()
                # A request that failed before this call says nothing of the next one.
                if asked and state.name == "FAILED":
                    failures += self._failed(state.why, failures)
            else:
                time.sleep(POLL)
        self._show(state)

    def _refuse_given_back(self) -> None:
        if self.given_back.exists():
            raise LaunchError(f"{self.name} was given back with --delete", 1)

    def _show(self, state: State) -> None:
        words = ", ".join(filter(None, [_MEANING.get(state.name, "waiting"), state.why]))
        say(f"{self.name} ({self.accelerator} in {self.zone}) is {state.name}: {words}")

    def _create(self) -> str:
        """Asks for the slice; why that failed, or ""."""
        say(f"asking for {self.name}, a {self.accelerator} in {self.zone}")
        done = run(self.create_command)
        refuse_login(done)
        return "" if done.status == 0 or "ALREADY_EXISTS" in done.err else done.reason

    def _failed(self, why: str, before: int) -> int:
        """Waits before the next request, after one that failed: 1; `before`: failed ones before.

        Raises:
            LaunchError: another request would fail too.
        """
        what = f"a {self.accelerator} in {self.zone}"
        if "quota" in why.lower():
            raise LaunchError(
                f"the quota of project {self.project} does not allow {what} ({why}); ask for more "
                "at https://console.cloud.google.com/iam-admin/quotas, or change --tpu, --zone, "
                "--spot or --reserved",
                1,
            )
        if "INVALID_ARGUMENT" in why or "PERMISSION_DENIED" in why:
            raise LaunchError(f"Google Cloud refuses {what}: {why}", 1)
        if before + 1 == ATTEMPTS:
            raise LaunchError(
                f"{ATTEMPTS} requests for {what} failed in a row, the last with: {why}; try later, "
                "or another --zone",
                1,
            )
        say(f"the request for {what} failed ({why}); again in {pause(before + 1):.0f} s")
        wait(before + 1)
        return 1

    def delete(self) -> None:
        """Deletes the queued resource and the slice in it; none may be there.

        Raises:
            LaunchError: gcloud could not.
        """
        patiently(self.delete_command, f"deleting {self.name}")

    # --- its hosts -------------------------------------------------------------------------------

    def reach(self, command: list[str], doing: str) -> Done:
        """Runs a command on hosts, a few times where it fails.

        Raises:
            LostError: the slice is no longer there.
            LaunchError: it failed each time.
        """
        for attempt in range(1, ATTEMPTS + 1):
            done = run(command)
            if done.status == 0:
                return done
            if self.state().name != "ACTIVE":
                raise LostError
            if attempt < ATTEMPTS:
                say(f"{doing} failed ({done.reason}); again in {pause(attempt):.0f} s")
                wait(attempt)
        raise LaunchError(
            f"{doing} failed {ATTEMPTS} times, the last with: {done.reason}; look for yourself "
            f"with `{shlex.join(self._hosts('ssh', '0', self.name))}`",
            1,
        )

    def reports(self, worker: str) -> list[Report]:
        """What hosts say of their run; `worker`: a number or "all"."""
        done = self.reach(self.status_command(worker), f"asking {self.name} for its run")
        found = re.findall(r"^([a-z]+) (\d+) ?(.*)$", done.out, re.MULTILINE)
        return [Report(word, int(lines), arguments) for word, lines, arguments in found]

    def report(self) -> Report:
        """What host 0 says of its run."""
        return self.reports("0")[0]

    def follow(self, line: int) -> int:
        """Prints the log of host 0 until the run ends or the connection does; the next line.

        gcloud repeats a command whose connection broke, so that lines may come twice.
        """
        first = line
        command = self.follow_command(line)
        with Popen(
            command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        ) as process:
            assert process.stdout is not None
            threading.Thread(target=self._leave_when_lost, args=[process], daemon=True).start()
            try:
                for text in process.stdout:
                    number, _, rest = text.partition(b":")
                    if rest.endswith(b"\n") and number == b"%d" % (line - first + 1):
                        sys.stdout.buffer.write(rest)
                        sys.stdout.flush()
                        line += 1
            finally:
                _kill(process)
        return line

    def _leave_when_lost(self, process: Popen) -> None:
        """Ends a connection to a slice that is not there any more: SSH finds out much later."""
        time.sleep(POLL)
        while process.poll() is None:
            done = run(self.describe_command)
            if not_found(done) or (done.status == 0 and not done.out.startswith("ACTIVE")):
                _kill(process)
            time.sleep(POLL)


def _kill(process: Popen) -> None:
    """Ends a process, and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
