"""Running gcloud: commands, and what its errors mean. Standard library only, as all of launch/."""

import os
import re
import shlex
import shutil
import subprocess
import time
from typing import NamedTuple

POLL = float(os.environ.get("LATTE_POLL_SECONDS", "30"))
"""Between two looks at a queued resource."""

_RETRY = float(os.environ.get("LATTE_RETRY_SECONDS", "10"))
"""Before the first repetition of what failed; it doubles from one to the next."""

ATTEMPTS = 5
"""Times that anything is tried in a row."""


class LaunchError(Exception):
    """Why the launch ends: one sentence that names the thing and the mend, and an exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Done(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def reason(self) -> str:
        """What it said last: gcloud's own error where there is one."""
        lines = [line.strip() for line in f"{self.out}\n{self.err}".splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("ERROR", "latte: "))]
        last = (errors or lines or [f"exit status {self.status}"])[-1]
        return re.sub(r"^ERROR: (\(gcloud\S*\) )?|^latte: ", "", last).rstrip(".")


def say(words: str) -> None:
    print(words, flush=True)


def run(command: list[str]) -> Done:
    """Runs a command to its end, without a terminal."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        return Done(127, "", f"{command[0]} is not on the PATH")
    return Done(done.returncode, done.stdout, done.stderr)


def pause(attempt: int) -> float:
    """Seconds before attempt + 1, after `attempt` failures in a row: at most ten minutes."""
    return min(_RETRY * 2 ** (attempt - 1), 600)


def wait(attempt: int) -> None:
    time.sleep(pause(attempt))


def patiently(command: list[str], doing: str) -> Done:
    """Runs a command that only asks, again where gcloud fails; NOT_FOUND is an answer.

    Raises:
        LaunchError: it failed each time.
    """
    for attempt in range(1, ATTEMPTS + 1):
        done = run(command)
        if done.status == 0 or not_found(done):
            return done
        refuse_login(done)
        if attempt < ATTEMPTS:
            say(f"{doing} failed ({done.reason}); again in {pause(attempt):.0f} s")
            wait(attempt)
    raise LaunchError(
        f"{doing} failed {ATTEMPTS} times: {done.reason}; try `{shlex.join(command)}`", 1
    )


def not_found(done: Done) -> bool:
    return done.status != 0 and ("NOT_FOUND" in done.err or "was not found" in done.err)


def refuse_login(done: Done) -> None:
    """Ends the launch where gcloud says that nobody is logged in."""
    if "gcloud auth login" in done.err:
        raise LaunchError("gcloud is not logged in; run `gcloud auth login`", 2)


def check_login() -> None:
    """Refuses a machine without gcloud, or with a gcloud that nobody is logged in to."""
    if shutil.which("gcloud") is None:
        raise LaunchError(
            "gcloud is not on the PATH; install it from https://cloud.google.com/sdk/docs/install",
            2,
        )
    if not patiently(ACCOUNT, "asking gcloud who is logged in").out.strip():
        raise LaunchError("gcloud is not logged in; run `gcloud auth login`", 2)


ACCOUNT = ["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]


def property_command(key: str) -> list[str]:
    """What asks gcloud's configuration for a value."""
    return ["gcloud", "config", "get-value", key]


def property_value(key: str, flag: str) -> str:
    """A value of gcloud's configuration.

    Raises:
        LaunchError: it is not set.
    """
    value = patiently(property_command(key), f"asking gcloud for {key}").out.strip()
    if not value or value == "(unset)":
        raise LaunchError(f"{flag} is missing; give it, or run `gcloud config set {key} VALUE`", 2)
    return value
