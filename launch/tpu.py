"""Runs a config on a TPU pod until it is done; launch/tpu.sh calls it."""

import argparse
import ast
import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import gcloud
import slices
from gcloud import ATTEMPTS, LaunchError, say
from pod import CACHE, LostError, Pod, Report

ROOT = Path(__file__).resolve().parents[1]

_DESCRIPTION = """\
Runs a config on a TPU pod until it is done: asks Google Cloud for the slice and waits for it, sends
this checkout's tracked files, installs, trains on every host and shows the log. A slice that is
taken back is asked for again, and the run goes on from its last checkpoint. The same command again
finds the run and shows its log; Ctrl-C leaves it running.
"""

_STEADY = 600
"""Seconds after which an end of the run counts as the first one again."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; see `{self.prog} --help`", 2)


def _parser() -> _Parser:
    parser = _Parser(
        "launch/tpu.sh",
        usage="%(prog)s --config NAME_OR_PATH [OPTION …] [--SECTION.FIELD VALUE …]",
        description=_DESCRIPTION,
        epilog="Settings of the config go to `latte train`, which lists them with --help.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="NAME_OR_PATH", help="a file of configs/, or any .py file")
    add("--tpu", help="the slice, such as v5litepod-256; by default the config's docstring's")
    add("--zone", help="by default that of `gcloud config`")
    add("--project", help="by default that of `gcloud config`")
    add(
        "--bucket",
        metavar="URL",
        help="where the run is kept, in runs/NAME; by default gs://PROJECT-latte",
    )
    add("--name", help="of the run and of its slice; by default the config's")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--spot", action="store_true", help="a slice that may be taken back; cheaper")
    kind.add_argument("--reserved", action="store_true", help="a slice of your reservation")
    add("--delete", action="store_true", help="let the run save, and give the slice back")
    add("--dry-run", action="store_true", help="print every command and run none")
    return parser


@dataclass(frozen=True)
class Job:
    """A run on a pod."""

    pod: Pod
    config: Path
    bucket: str
    settings: list[str]

    @property
    def archive(self) -> Path:
        return CACHE / f"{self.pod.name}.tar.gz"

    @property
    def run_dir(self) -> str:
        return f"{self.bucket}/runs/{self.pod.name}"

    @property
    def sent_config(self) -> str:
        """The config's path on the hosts: one that is not in configs/ is sent beside the rest."""
        if self.config.is_relative_to(ROOT / "configs"):
            return str(self.config.relative_to(ROOT))
        return f"launched/{self.config.name}"

    @property
    def train_arguments(self) -> list[str]:
        run = ["--config", self.sent_config, "--run-dir", self.run_dir]
        return ["train", *run, *self.settings]

    @property
    def plan_command(self) -> list[str]:
        topology = slices.topology(self.pod.accelerator)
        latte = str(ROOT / ".venv" / "bin" / "latte")
        config = ["--config", str(self.config), "--topology", topology]
        return [latte, "plan", *config, *self.settings]


ENVIRONMENT = [
    "bash",
    "-c",
    "set -euo pipefail; "
    f"source {shlex.quote(str(ROOT / 'launch' / 'common.sh'))}; "
    "make_environment requirements.txt; make_tpu_compiler",
]
_GIT = ["git", "-C", str(ROOT)]
COMMIT = [*_GIT, "rev-parse", "HEAD"]
CHANGES = [*_GIT, "status", "--porcelain"]
TRACKED = [*_GIT, "ls-files", "-z"]
UNTRACKED = [*TRACKED, "--others", "--exclude-standard", "--", "src", "configs", "launch"]


# --- what is asked for -------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the config's settings.

    Raises:
        LaunchError: an option that there is not.
    """
    parser = _parser()
    options, settings = parser.parse_known_args(argv)
    for word in settings:
        if word.startswith("-") and not re.match(r"--\w+\.|-\.?\d", word):
            flags = [flag for action in parser._actions for flag in action.option_strings]
            near = difflib.get_close_matches(word.partition("=")[0], flags, 1)
            hint = f"did you mean {near[0]}?" if near else f"see `{parser.prog} --help`"
            raise LaunchError(f"unknown option {word!r}; {hint}", 2)
    if options.config is None:
        raise LaunchError(
            "--config is missing; name a file of configs/ or the path of a .py file", 2
        )
    return options, settings


def find_config(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix != ".py":
        path = ROOT / "configs" / f"{name_or_path}.py"
    if not path.is_file():
        known = sorted(p.stem for p in (ROOT / "configs").glob("*.py"))
        near = difflib.get_close_matches(name_or_path, known, 1) or known
        raise LaunchError(f"there is no config {name_or_path}; there is {', '.join(near)}", 2)
    return path.resolve()


def slice_of(config: Path) -> str:
    """The slice that a config's docstring names."""
    try:
        words = ast.get_docstring(ast.parse(config.read_text(encoding="utf-8"))) or ""
    except SyntaxError as error:
        raise LaunchError(f"{config}, line {error.lineno}: {error.msg}", 2) from error
    found = slices.NAME.search(words)
    if not found:
        raise LaunchError(
            f"--tpu is missing, and {config.name} names no slice; give one, --tpu v5litepod-256",
            2,
        )
    return found[0]


def name_of(options: argparse.Namespace, config: Path) -> str:
    """The run's name, as Google Cloud allows it."""
    name = options.name or re.sub(r"[^a-z0-9]+", "-", config.stem.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,60}[a-z0-9])?", name):
        raise LaunchError(
            f"--name is {name!r}; Google Cloud allows lower-case letters, digits and hyphens, a "
            "letter first",
            2,
        )
    return name


def resolve(options: argparse.Namespace, settings: list[str]) -> Job:
    """The job, with what the options leave out; a dry run leaves to the shell what gcloud knows."""
    config = find_config(options.config)
    accelerator = options.tpu or ("" if options.delete else slice_of(config))
    if accelerator:
        slices.topology(accelerator)
    name = name_of(options, config)

    if not options.dry_run:
        gcloud.check_login()

    def known(key: str, flag: str) -> str:
        if options.dry_run:
            return f"$({shlex.join(gcloud.property_command(key))})"
        return gcloud.property_value(key, flag)

    project = options.project or known("project", "--project")
    zone = options.zone or known("compute/zone", "--zone")
    bucket = (options.bucket or f"gs://{project}-latte").rstrip("/")
    if "://" not in bucket and not bucket.startswith("/"):
        raise LaunchError(
            f"--bucket is {bucket!r}, which is no URL; did you mean gs://{bucket}?", 2
        )
    provisioning = "--spot" if options.spot else "--reserved" if options.reserved else ""
    return Job(Pod(name, accelerator, zone, project, provisioning), config, bucket, settings)


# --- before anything is created ------------------------------------------------------------------


def bucket_command(bucket: str) -> list[str]:
    return ["gcloud", "storage", "ls", bucket]


def check_bucket(job: Job) -> None:
    """Refuses a bucket that is not there."""
    if not job.bucket.startswith("gs://"):
        return
    done = gcloud.run(bucket_command(job.bucket))
    if done.status:
        region = job.pod.zone.rpartition("-")[0]
        raise LaunchError(
            f"the bucket {job.bucket} cannot be read ({done.reason}); name another with --bucket, "
            f"or make it: `gcloud storage buckets create {job.bucket} "
            f"--project={job.pod.project} --location={region}`",
            2,
        )


def check_plan(job: Job) -> None:
    """Refuses a run that does not fit the slice, in the words of `latte plan`."""
    made = subprocess.run(ENVIRONMENT, stdin=subprocess.DEVNULL)
    if made.returncode:
        raise LaunchError("the environment for `latte plan` could not be made; see above", 1)
    compiler = {"PYTHONPATH": str(ROOT / ".venv" / "libtpu"), "JAX_PLATFORMS": "cpu"}
    say(f"checking that {job.config.stem} fits a {job.pod.accelerator}")
    done = subprocess.run(
        job.plan_command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | compiler,
        text=True,
    )
    if done.returncode:
        # 1: it does not fit; 2: bad input. Whatever else ended it, nobody knows that it fits.
        reason = gcloud.Done(done.returncode, "", done.stderr).reason
        raise LaunchError(reason, 2 if done.returncode == 2 else 1)


def pack(job: Job) -> None:
    """Packs the files that git tracks, as they are now, and the config."""
    files = set(_listed(TRACKED))
    forgotten = [name for name in _listed(UNTRACKED) if ROOT / name != job.config]
    if forgotten:
        say(f"not sent, because git does not track it: {', '.join(forgotten)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = job.archive.with_suffix(f".{os.getpid()}")
    with tarfile.open(partial, "w:gz") as archive:
        for name in sorted(files):
            if (ROOT / name).is_file():  # one that was deleted is tracked still
                archive.add(ROOT / name, name)
        if job.sent_config not in files:
            archive.add(job.config, job.sent_config)
        _add_git_state(archive)
    partial.replace(job.archive)


def _add_git_state(archive: tarfile.TarFile) -> None:
    """Adds what a checkout would know, for environment.json: latte.environment reads it."""
    commit = gcloud.run(COMMIT)
    if commit.status == 0:  # a repository without any commit has none to tell
        state = {"commit": commit.out.strip(), "dirty": bool(gcloud.run(CHANGES).out)}
        data = json.dumps(state).encode()
        member = tarfile.TarInfo("launched/git.json")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))


def _listed(command: list[str]) -> list[str]:
    done = gcloud.run(command)
    if done.status:
        raise LaunchError(f"{ROOT} is not a git checkout that says what to send: {done.reason}", 2)
    return list(filter(None, done.out.split("\0")))


# --- the run -----------------------------------------------------------------------------------


class Launch:
    """Takes a job to its end, over as many slices as that needs."""

    def __init__(self, job: Job) -> None:
        self.job, self.pod = job, job.pod
        self.line = 1
        """The next line of host 0's log to print."""

    def is_going_on(self) -> bool:
        """Whether there is nothing to do but to show the run's log."""
        try:
            return self.pod.state().name == "ACTIVE" and self._is_mine(self.pod.report())
        except LostError:
            return False

    def run(self) -> None:
        """Returns when the run is done.

        Raises:
            LaunchError: it cannot go on.
        """
        failures = 0
        while True:
            since = time.monotonic()
            try:
                word = self._run_once()
            except LostError:
                failures = 0
                say(f"{self.pod.name} was taken back")
                continue
            if word == "done":
                break
            failures = 1 if time.monotonic() - since > _STEADY else failures + 1
            self._judge(word, failures)
            say(f"the run {_ENDS[word]}; starting it again in {gcloud.pause(failures):.0f} s")
            gcloud.wait(failures)
        say(f"the run is done: {self.job.run_dir}; the slice is still held, {self._give_back}")

    def _run_once(self) -> str:
        """How the run ended, on a slice that it has waited for: see tpu_host.sh.

        Raises:
            LostError: it ended, or could not begin, because the slice is no longer there.
        """
        self.pod.acquire()
        word, lines = self._attach(), 0
        while word == "running":
            self.line = self.pod.follow(self.line)
            report = self.pod.report()
            word, lines = report.word, report.lines
            if word == "running":  # the connection broke
                gcloud.wait(1)
        if self.line <= lines:  # it broke, and the run ended meanwhile
            self.line = self.pod.follow(self.line)
        if word in _ENDS and self.pod.state().name != "ACTIVE":
            raise LostError
        return word

    def _attach(self) -> str:
        """Sees to it that the run is going on on every host, unless it is done."""
        report = self.pod.report()
        if self._is_mine(report) and self._everywhere(report.word):
            self.line = max(1, report.lines - 19)
            say(f"the run is {'going on' if report.word == 'running' else 'done'} already")
            return report.word
        self.line = report.lines + 1
        say("sending the code and installing it on every host (minutes, the first time)")
        self.pod.reach(self.pod.copy_command(str(self.job.archive)), "sending the code")
        self.pod.reach(self.pod.unpack_command(), "installing")
        self.pod.reach(self.pod.start_command(self.job.train_arguments), "starting the run")
        return "running"

    def _is_mine(self, report: Report) -> bool:
        """Whether a run that goes on, or is done, is this one.

        Raises:
            LaunchError: another one goes on.
        """
        mine = " ".join(self.job.train_arguments)
        if report.word == "running" and report.arguments != mine:
            raise LaunchError(
                f"{self.pod.name} runs something else: `latte {report.arguments}`; take another "
                f"--name, or stop it, {self._give_back}",
                2,
            )
        return report.word in ("running", "done") and report.arguments == mine

    def _everywhere(self, word: str) -> bool:
        return word == "done" or all(r.word == word for r in self.pod.reports("all"))

    def _judge(self, word: str, failures: int) -> None:
        """Ends the launch where the run would end the same way again."""
        held = f"the slice is still held, {self._give_back}"
        if word == "refused":
            raise LaunchError(f"`latte train` refuses its input, as the log above says; {held}", 2)
        if word == "failed":
            raise LaunchError(f"the run failed, as the log above says; {held}", 1)
        if failures == ATTEMPTS:
            raise LaunchError(f"the run {_ENDS[word]} {failures} times in a row; {held}", 1)

    @property
    def _give_back(self) -> str:
        pod = self.pod
        place = ["--name", pod.name, "--zone", pod.zone, "--project", pod.project]
        config = self.job.config
        known = config.parent == ROOT / "configs"
        named = ["--config", config.stem if known else str(config)]
        words = ["launch/tpu.sh", *named, *place, "--delete"]
        return f"`{shlex.join(words)}` gives it back"


_ENDS = {"stopped": "was asked to stop", "crashed": "crashed", "lost": "ended with its host"}


def delete(pod: Pod) -> None:
    """Lets the run save, and gives the slice back."""
    CACHE.mkdir(parents=True, exist_ok=True)
    pod.given_back.touch()
    state = pod.state()
    if not state.name:
        say(f"there is no {pod.name} in {pod.zone}: nothing to delete")
        return
    if state.name == "ACTIVE":
        say("asking the run to save and to stop")
        gcloud.run(pod.stop_command())
    say(f"deleting {pod.name}")
    pod.delete()


def commands(job: Job, options: argparse.Namespace) -> list[list[str]]:
    """Everything that a launch runs, in its order, were the slice never taken back."""
    pod = job.pod
    keys = {"project": options.project, "compute/zone": options.zone}
    asked = [gcloud.property_command(key) for key, value in keys.items() if not value]
    before = [gcloud.ACCOUNT, *asked]
    if options.delete:
        return [*before, pod.describe_command, pod.stop_command(), pod.delete_command]
    return [
        *before,
        *([bucket_command(job.bucket)] if job.bucket.startswith("gs://") else []),
        pod.describe_command,
        ENVIRONMENT,
        job.plan_command,
        TRACKED,
        UNTRACKED,
        COMMIT,
        CHANGES,
        pod.create_command,
        pod.describe_command,
        pod.status_command("0"),
        pod.copy_command(str(job.archive)),
        pod.unpack_command(),
        pod.start_command(job.train_arguments),
        pod.follow_command(1),
        pod.status_command("0"),
    ]


def show(command: list[str]) -> str:
    """A command for a shell to read, which still asks gcloud for what was left out."""
    return " ".join(f'"{word}"' if word.count("$(") else shlex.quote(word) for word in command)


def main(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    try:
        options, settings = parse(argv)
        job = resolve(options, settings)
        if options.dry_run:
            say("\n".join(map(show, commands(job, options))))
        elif options.delete:
            delete(job.pod)
        else:
            go(job)
    except LaunchError as error:
        print(f"latte: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        words = "interrupted here only; the same command goes on, and --delete ends the run"
        print(f"latte: {words}", file=sys.stderr)
        return 130
    return 0


def go(job: Job) -> None:
    """Checks, and then runs, a job."""
    check_bucket(job)
    launch = Launch(job)
    if not launch.is_going_on():
        check_plan(job)
    pack(job)
    job.pod.given_back.unlink(missing_ok=True)
    launch.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
