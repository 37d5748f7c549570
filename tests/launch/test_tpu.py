"""launch/tpu.sh as a user meets it, against a stand-in of Google Cloud (stand_in.py)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from latte.config import CONFIGS
from tests.launch.stand_in import processes
from tests.training.tiny import losses, same_run

# A run that waits for a test to say, in $HOME/end, how it ends.
WAITING = """
echo $$ >>"$HOME/starts"
echo "arguments $*"
trap 'echo "asked to stop: saved step 7"; exit 0' TERM
until [ -e "$HOME/end" ]; do sleep 0.05; done
source "$HOME/end"
"""
NAME = "latte-tiny"


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 200
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def read_until(process: subprocess.Popen, words: str) -> str:
    """What a launch says up to a line with these words."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said + process.communicate()[1])


def one_sentence(done: subprocess.CompletedProcess, status: int, *words: str) -> None:
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("latte: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def end(host: Path, how: str) -> None:
    (host / "end.partial").write_text(how)
    (host / "end.partial").rename(host / "end")


# --- a run from its first request to its last step -----------------------------------------------


def test_a_preempted_run_goes_on_to_its_end_bitwise(launcher, tiny, tmp_path):
    """Created after a wait, synced, trained, preempted, asked for again, resumed, done."""
    settings = ["--train.eval_every", "60", "--train.sample_tokens", "0"]
    whole, run_dir = tmp_path / "whole", launcher.bucket / "runs" / "tiny"
    tiny.train(whole, *settings).ok()
    launcher.cloud.set(delay=2)
    process = launcher.start(*launcher.options(str(tiny.config)), "--spot", *settings)
    metrics = run_dir / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 8)
    launcher.cloud.preempt("tiny")
    assert 8 <= len(losses(run_dir)) < 60
    out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    for folder in (whole, run_dir):
        (folder / "samples.txt").touch()
    same_run(whole, run_dir)
    git = [start["git"] for start in json.loads((run_dir / "environment.json").read_text())]
    assert [(len(state["commit"]), state["dirty"]) for state in git] == [(40, False)] * 2
    assert launcher.cloud.count("queued-resources", "create", "--spot") == 2
    for words in (
        "tiny (v5litepod-4 in my-zone-a) is WAITING_FOR_RESOURCES: in the queue",
        "tiny (v5litepod-4 in my-zone-a) is SUSPENDED: preempted",
        f"the run is done: {run_dir}; the slice is still held",
    ):
        assert words in out
    assert out.count("asking for tiny, a v5litepod-4 in my-zone-a") == 2


def test_every_host_gets_the_run_and_a_second_call_finds_it(launcher):
    launcher.cloud.set(hosts=2, latte=WAITING)
    first = launcher.start(*launcher.options(), "--train.steps", "9")
    run = f"--config configs/latte_tiny.py --run-dir {launcher.bucket}/runs/{NAME} --train.steps 9"
    read_until(first, f"arguments train {run}")
    second = launcher.start(*launcher.options(), "--train.steps", "9")
    said = read_until(second, f"arguments train {run}")
    assert "the run is going on already" in said
    for host in launcher.cloud.hosts(NAME):
        assert len((host / "starts").read_text().split()) == 1
        end(host, "echo finished")
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert out.startswith("finished\nthe run is done")
    done = launcher.run(*launcher.options(), "--train.steps", "9")
    assert done.returncode == 0
    assert "the run is done already" in done.stdout
    assert launcher.cloud.count("create") == 1
    assert launcher.cloud.count("scp") == 1
    assert len(launcher.plan_calls.read_text().splitlines()) == 1


def test_an_interrupt_leaves_the_run_going_on(launcher):
    launcher.cloud.set(latte=WAITING)
    first = launcher.start(*launcher.options())
    read_until(first, "arguments train")
    os.killpg(first.pid, signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert (
        err == "latte: interrupted here only; the same command goes on, and --delete ends the run\n"
    )
    other = launcher.run(*launcher.options(), "--train.steps", "9")
    one_sentence(other, 2, f"{NAME} runs something else: `latte train", "take another --name")
    larger = launcher.run("--config", "latte_tiny", "--tpu", "v6e-8", "--bucket", "/tmp")
    one_sentence(larger, 2, f"{NAME} in my-zone-a is a v5litepod-4, not a v6e-8; give it back")
    [host] = launcher.cloud.hosts(NAME)
    assert processes(str(host), "supervise")
    gone = launcher.run("--config", "latte_tiny", "--delete")
    assert gone.returncode == 0, gone.stderr
    assert "asked to stop: saved step 7" in (host / "latte-run" / "log").read_text()
    assert (host / "latte-run" / "result").read_text() == "stopped\n"
    assert launcher.cloud.resources() == []
    assert not processes(str(host))
    again = launcher.run("--config", "latte_tiny", "--delete")
    assert again.returncode == 0
    assert f"there is no {NAME} in my-zone-a: nothing to delete" in again.stdout


def test_a_slice_that_is_given_back_is_not_asked_for_again(launcher):
    """By the call that still shows its log."""
    launcher.cloud.set(latte=WAITING)
    process = launcher.start(*launcher.options())
    read_until(process, "arguments train")
    assert launcher.run("--config", "latte_tiny", "--delete").returncode == 0
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == f"latte: {NAME} was given back with --delete\n"
    assert "asked to stop: saved step 7" in out
    assert launcher.cloud.resources() == []
    assert launcher.cloud.count("create") == 1


def test_a_run_that_ended_on_one_host_only_is_started_again_on_all(launcher):
    launcher.cloud.set(hosts=2, latte=WAITING)
    first = launcher.start(*launcher.options())
    read_until(first, "arguments train")
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait() == 130
    hosts = launcher.cloud.hosts(NAME)
    until((hosts[1] / "starts").exists)
    os.killpg(int((hosts[1] / "latte-run" / "pid").read_text()), signal.SIGKILL)
    second = launcher.start(*launcher.options())
    said = read_until(second, "arguments train")
    assert "going on already" not in said
    until(lambda: len((hosts[1] / "starts").read_text().split()) == 2)
    for host in hosts:
        assert len((host / "starts").read_text().split()) == 2
        end(host, "echo finished")
    assert second.communicate(timeout=60)[1] == ""
    assert second.returncode == 0


def test_what_is_sent(launcher, tmp_path):
    """What git tracks, as it is now, and a config from elsewhere."""
    config = tmp_path / "mine.py"
    config.write_text('"""On a v5litepod-4."""\n')
    changed = launcher.checkout / "configs" / "latte_tiny.py"
    untracked = launcher.checkout / "src" / "new.py"
    before = changed.read_text()
    changed.write_text(before + "# changed\n")
    untracked.write_text("")
    launcher.cloud.set(latte="cat configs/latte_tiny.py; echo $*")
    try:
        done = launcher.run("--config", str(config), "--bucket", str(launcher.bucket))
    finally:
        changed.write_text(before)
        untracked.unlink()
    assert done.returncode == 0, done.stderr
    assert "not sent, because git does not track it: src/new.py" in done.stdout
    assert "# changed\n" in done.stdout
    assert "train --config launched/mine.py" in done.stdout
    [host] = launcher.cloud.hosts("mine")
    assert (host / "latte" / "launched" / "mine.py").exists()
    with tarfile.open(host / "latte.tar.gz") as archive:
        names = archive.getnames()
    assert "src/latte/train.py" in names
    assert "src/new.py" not in names
    assert not [name for name in names if name.startswith((".git/", ".venv"))]


def test_a_run_that_saves_before_its_slice_is_taken_back(launcher):
    launcher.cloud.set(latte=WAITING)
    process = launcher.start(*launcher.options())
    read_until(process, "arguments train")
    [host] = launcher.cloud.hosts(NAME)
    os.killpg(int((host / "latte-run" / "pid").read_text()), signal.SIGTERM)
    until((host / "latte-run" / "result").exists)
    launcher.cloud.preempt(NAME)
    said = read_until(process, "arguments train")
    assert "asked to stop: saved step 7" in said
    assert f"{NAME} (v5litepod-4 in my-zone-a) is SUSPENDED: preempted" in said
    end(launcher.cloud.hosts(NAME)[0], "echo finished")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("finished\nthe run is done")


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, "latte_tiny does not fit v5e:2x2: 20 GB of 16 GB; lower --train.batch_size"),
        (2, "there is no setting train.stps; did you mean train.steps?"),
        (2, "unknown command 'plan'; there are train, eval"),
    ],
)
def test_a_plan_that_does_not_fit_creates_nothing(launcher, status, error):
    arguments = [*launcher.options(), "--train.steps", "9"]
    done = launcher.run(*arguments, PLAN_STATUS=str(status), PLAN_ERROR=error)
    one_sentence(done, status, error)
    assert launcher.cloud.count("create") == 0
    config = launcher.checkout / "configs" / "latte_tiny.py"
    called = f"plan --config {config} --topology v5e:2x2 --train.steps 9\n"
    assert launcher.plan_calls.read_text() == called


def test_a_plan_that_ends_otherwise_does_not_count_as_fitting(launcher):
    done = launcher.run(*launcher.options(), PLAN_STATUS="137")
    one_sentence(done, 1, "exit status 137")
    assert launcher.cloud.count("create") == 0


QUOTA = "Quota 'TPUV5sLitepodPerProjectPerZone' exhausted. Limit 0 in zone my-zone-a"


@pytest.mark.parametrize("when", ["create_errors", "failures"])
def test_a_quota_that_is_refused(launcher, when):
    launcher.cloud.set(**{when: [f"RESOURCE_EXHAUSTED: {QUOTA}"] * 9})
    done = launcher.run(*launcher.options())
    one_sentence(done, 1, "the quota of project my-project does not allow a v5litepod-4", QUOTA)
    assert "iam-admin/quotas" in done.stderr
    assert launcher.cloud.count("create") == 1


def test_a_zone_without_capacity_is_asked_again_and_not_for_ever(launcher):
    words = "There is no more capacity in the zone"
    launcher.cloud.set(failures=[words] * 2, create_errors=[words], latte="echo finished")
    done = launcher.run(*launcher.options())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"({words}); again in") == 3
    assert launcher.run(*launcher.options(), "--delete").returncode == 0
    launcher.cloud.set(failures=[words] * 9)
    done = launcher.run(*launcher.options())
    one_sentence(
        done, 1, "5 requests for a v5litepod-4 in my-zone-a failed in a row", "another --zone"
    )
    assert launcher.cloud.resources() == []


def test_a_request_that_failed_before_is_replaced(launcher):
    launcher.cloud.set(failures=[QUOTA])
    assert launcher.run(*launcher.options()).returncode == 1
    launcher.cloud.set(latte="echo finished")
    with_failed = launcher.run(*launcher.options())
    assert with_failed.returncode == 0, with_failed.stderr


def test_ssh_that_fails_is_tried_again_and_not_for_ever(launcher):
    launcher.cloud.set(ssh_failures=3, latte="echo finished")
    done = launcher.run(*launcher.options())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Connection refused); again in") == 3
    launcher.cloud.set(ssh_failures=99)
    done = launcher.run(*launcher.options())
    one_sentence(
        done, 1, "failed 5 times", "Connection refused", f"`gcloud compute tpus tpu-vm ssh {NAME}"
    )


@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_a_connection_that_breaks_shows_each_line_once(launcher, ends_meanwhile):
    launcher.cloud.set(latte=WAITING)
    process = launcher.start(*launcher.options())
    said = read_until(process, "arguments train")
    [host] = launcher.cloud.hosts(NAME)
    if ends_meanwhile:
        end(host, "echo finished")
    for follower in processes(str(host), "tail"):
        os.kill(follower, signal.SIGKILL)
    for follower in processes(str(host), "follow"):
        os.kill(follower, signal.SIGKILL)
    if not ends_meanwhile:
        end(host, "echo finished")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert (said + out).count("arguments train") == 1
    assert out.count("finished") == 1


@pytest.mark.parametrize(
    ("latte", "status", "words"),
    [
        ('echo "latte: 5 steps in a row were skipped" >&2; exit 1', 1, "the run failed"),
        ('echo "latte: train.steps is 0" >&2; exit 2', 2, "refuses its input"),
    ],
)
def test_a_run_that_would_fail_again_is_not_started_again(launcher, latte, status, words):
    launcher.cloud.set(latte=f'echo >>"$HOME/starts"; {latte}')
    done = launcher.run(*launcher.options())
    one_sentence(done, status, words, "--delete` gives it back")
    [host] = launcher.cloud.hosts(NAME)
    assert (host / "starts").read_text() == "\n"


LOST = (
    "latte: process 1 on b is gone; process 0 on a stops, and the same command goes on from the "
    "last checkpoint"
)


@pytest.mark.parametrize("words", ["Traceback (most …)", LOST], ids=["crash", "lost host"])
def test_a_run_that_crashes_is_started_again(launcher, words):
    crash = f'touch "$HOME/once"; echo "{words}" >&2; exit 1'
    launcher.cloud.set(latte=f'if [ -e "$HOME/once" ]; then echo finished; else {crash}; fi')
    done = launcher.run(*launcher.options())
    assert (done.returncode, done.stderr) == (0, "")
    assert "the run crashed; starting it again in" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latte", "words"),
    [
        ('echo "Traceback (most …)" >&2; exit 1', "the run crashed 5 times in a row"),
        ("kill -KILL $$", "the run crashed 5 times in a row"),
        ("kill -KILL $PPID $$", "the run ended with its host 5 times in a row"),
    ],
)
def test_a_run_that_crashes_is_not_started_for_ever(launcher, latte, words):
    launcher.cloud.set(latte=f'echo >>"$HOME/starts"; {latte}')
    one_sentence(launcher.run(*launcher.options()), 1, words, "--delete` gives it back")
    [host] = launcher.cloud.hosts(NAME)
    assert (host / "starts").read_text().count("\n") == 5


def test_a_run_that_is_asked_to_stop_is_started_again(launcher):
    """As a host is that is about to be taken back."""
    launcher.cloud.set(latte=WAITING)
    process = launcher.start(*launcher.options())
    read_until(process, "arguments train")
    [host] = launcher.cloud.hosts(NAME)
    os.killpg(int((host / "latte-run" / "pid").read_text()), signal.SIGTERM)
    said = read_until(process, "arguments train")
    assert "asked to stop: saved step 7\nthe run was asked to stop; starting it again" in said
    end(host, "echo finished")
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def test_a_host_without_a_new_enough_python(launcher, tmp_path):
    """As the TPU images are; what is asked of their package manager is only written down."""
    host, tools = tmp_path / "latte", tmp_path / "tools"
    shutil.copytree(launcher.checkout, host, symlinks=True)
    tools.mkdir()
    for name in ("bash", "cmp", "dirname"):
        (tools / name).symlink_to(Path("/usr/bin") / name)
    (tools / "sudo").write_text('#!/usr/bin/env bash\necho "$@"\n')
    (tools / "sudo").chmod(0o755)
    done = subprocess.run(
        ["bash", host / "launch" / "tpu_host.sh", "install"],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("add-apt-repository --yes ppa:deadsnakes/ppa\n")
    assert done.stdout.endswith(" install python3.12 python3.12-venv\n")


# --- what is asked for ---------------------------------------------------------------------------


def test_a_dry_run_prints_every_command_and_runs_none(launcher):
    place = ["--zone", "my-zone-a", "--project", "my-project"]
    dry = launcher.run(*launcher.options(), *place, "--reserved", "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert launcher.cloud.calls() == []
    assert not launcher.plan_calls.exists()
    launcher.cloud.set(latte="echo finished")
    assert launcher.run(*launcher.options(), *place, "--reserved").returncode == 0
    printed = subprocess.run(
        ["bash", "-c", f'gcloud() {{ printf "%s\\n" "$@" "--"; }}\n{gcloud_only(dry.stdout)}'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("--\n")
    for call in launcher.cloud.calls():
        assert "".join(f"{word}\n" for word in call) in printed
    assert "latte plan --config" in dry.stdout
    assert "make_environment requirements.txt" in dry.stdout


def gcloud_only(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("gcloud"))


def test_a_dry_run_leaves_to_the_shell_what_gcloud_knows(launcher):
    dry = launcher.run("--config", "latte_tiny", "--tpu", "v6e-8", "--dry-run")
    assert '"--project=$(gcloud config get-value project)"' in dry.stdout
    assert '"gs://$(gcloud config get-value project)-latte"' in dry.stdout
    gone = launcher.run("--config", "latte_tiny", "--delete", "--dry-run")
    assert "queued-resources delete latte-tiny" in gone.stdout
    assert "create" not in gone.stdout
    assert launcher.cloud.calls() == []


@pytest.mark.parametrize(
    ("tpu", "topology", "runtime"),
    [
        ("v5litepod-256", "v5e:16x16", "v2-alpha-tpuv5-lite"),
        ("v5litepod-8", "v5e:2x4", "v2-alpha-tpuv5-lite"),
        ("v6e-64", "v6e:8x8", "v2-alpha-tpuv6e"),
        ("v4-8", "v4:2x2x1", "tpu-ubuntu2204-base"),
        ("v4-64", "v4:2x4x4", "tpu-ubuntu2204-base"),
        ("v5p-128", "v5p:4x4x4", "v2-alpha-tpuv5"),
    ],
)
def test_slices(launcher, tpu, topology, runtime):
    dry = launcher.run("--config", "latte_tiny", "--tpu", tpu, "--dry-run")
    assert f"--topology {topology}\n" in dry.stdout
    assert f"--runtime-version={runtime}" in dry.stdout


@pytest.mark.parametrize("size", ["150m", "400m", "1b", "3b"])
@pytest.mark.parametrize("model", ["latte", "transformer"])
def test_a_config_names_the_slice_that_it_was_planned_on(launcher, model, size):
    name = f"{model}_{size}"
    dry = launcher.run("--config", name, "--dry-run")
    planned = re.search(
        r"^latte plan .* (--topology \S+)", (CONFIGS / f"{name}.py").read_text(), re.M
    )
    assert planned is not None
    assert f"{planned[1]}\n" in dry.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--config is missing"),
        ("--config latte_tinny", "there is no config latte_tinny; there is latte_tiny"),
        ("--config latte_tiny", "--tpu is missing, and latte_tiny.py names no slice"),
        ("--config latte_tiny --tpu v5e-8", "--tpu is 'v5e-8', which is no slice"),
        ("--config latte_tiny --tpu v5litepod-7", "there is no slice v5litepod-7; the sizes of"),
        ("--config latte_tiny --tpu v6e-8 --zon a", "unknown option '--zon'; did you mean --zone?"),
        ("--config latte_tiny --tpu v6e-8 --nonsense", "unknown option '--nonsense'"),
        ("--config latte_tiny --tpu v6e-8 --spot --reserved", "not allowed with"),
        ("--config latte_tiny --tpu v6e-8 --name A_b", "--name is 'A_b'; Google Cloud allows"),
        ("--config latte_tiny --tpu v6e-8 --bucket mine", "did you mean gs://mine?"),
        (
            "--config latte_tiny --tpu v6e-8 --bucket gs://no",
            "gcloud storage buckets create gs://no",
        ),
    ],
)
def test_bad_input_is_one_sentence(launcher, arguments, words):
    one_sentence(launcher.run(*arguments.split()), 2, words)
    assert launcher.cloud.count("create") == 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("account", "gcloud is not logged in; run `gcloud auth login`"),
        ("zone", "--zone is missing; give it, or run `gcloud config set compute/zone VALUE`"),
        ("project", "--project is missing; give it, or run `gcloud config set project VALUE`"),
    ],
)
def test_what_gcloud_does_not_know(launcher, setting, words):
    launcher.cloud.set(**{setting: ""})
    one_sentence(launcher.run(*launcher.options()), 2, words)


def test_no_gcloud(launcher):
    tools = launcher.folder / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(Path("/usr/bin") / name)
    (tools / "python3").symlink_to(sys.executable)
    done = subprocess.run(
        [launcher.checkout / "launch" / "tpu.sh", *launcher.options()],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    one_sentence(done, 2, "gcloud is not on the PATH; install it from https://cloud.google.com/sdk")


def test_help(launcher):
    done = launcher.run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: launch/tpu.sh --config")
    for flag in ("--tpu", "--zone", "--bucket", "--spot", "--reserved", "--delete", "--dry-run"):
        assert flag in done.stdout
