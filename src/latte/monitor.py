"""Signs of life: of this process for the others and for who watches from outside, and of theirs.

A thread of every process says each second that it lives, and reads what the others said. One that
has been silent for `train.patience` seconds, or that said that it failed, is named and this process
ends: in a step that waits for a lost device nothing else can. So it does where the first process,
which keeps what they say, does not answer. In the run directory the first process keeps
`heartbeat.json`, and a process whose step takes ten times the usual writes `stacks-N.txt`.
"""

import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from latte import processes

_EVERY = 1.0
"""Seconds between signs of life."""
_SLOW = 10
"""A step of this many times the median is a stall."""
_LEAST_STALL = 5.0
"""Seconds below which no step is one: the host's own pauses are about a second."""
_REMEMBERED = 101
"""Steps that the median is taken over."""


class Monitor:
    """Watches one process of a run, and the others from it."""

    def __init__(self, run_dir: Path, patience: int):
        self._run_dir, self._patience = run_dir, patience
        self._step, self._since = 0, 0.0
        self._armed = self._told = False
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._heard: dict[str, tuple[str, float]] = {}
        self._reached = time.monotonic()
        self._ended = threading.Event()
        self._why = ""
        self._threads = [
            threading.Thread(target=do, name=f"monitor {do.__name__}", daemon=True)
            for do in (self._watch, self._talk)
        ]

    def __enter__(self) -> "Monitor":
        for thread in self._threads:
            thread.start()
        processes.where_first_is_lost(self._end_without_first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and processes.count() > 1:
            # A collective broke: the monitor finds out which process is gone, and ends this one.
            print(f"latte: {_first_line(error)}", file=sys.stderr, flush=True)
            time.sleep(2 * self._patience)
        self._ended.set()
        for thread in self._threads:
            thread.join(self._patience)
        if error is None:
            self._beat("done")

    def step(self, step: int) -> None:
        """A step was started; the next one is expected as soon as usual."""
        now = time.monotonic()
        if self._armed:
            self._took.append(now - self._since)
        self._step, self._since, self._armed, self._told = step, now, True, False

    def rest(self) -> None:
        """What follows is no step: a compilation, a checkpoint, an evaluation."""
        self._armed = False

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY):
            self._look_at_step()
            if time.monotonic() - self._reached > self._patience and not processes.is_first():
                self._end(
                    f"{processes.name(0)}, which coordinates the run, has not answered for "
                    f"{self._patience} s{self._why}"
                )

    def _talk(self) -> None:
        """Apart from `_watch`, because a store whose process is frozen never answers."""
        while not self._ended.wait(_EVERY):
            try:
                self._beat("lives")
                self._look_at_others()
                self._reached = time.monotonic()
            except Exception as error:  # Whatever the store of another process's host says.
                self._why = f" ({_first_line(error)})"

    def _beat(self, word: str) -> None:
        sign = {"word": word, "step": self._step, "time": time.time()}
        processes.write(f"beat/{processes.index()}", json.dumps(sign))
        if processes.is_first() and self._run_dir.is_dir():
            with contextlib.suppress(OSError):  # A full disk is named where it matters.
                _replace(self._run_dir / "heartbeat.json", json.dumps(sign) + "\n")

    def _look_at_others(self) -> None:
        now = time.monotonic()
        for other, sign in processes.read_all("beat").items():
            if other == str(processes.index()):
                continue
            said: dict[str, Any] = json.loads(sign)
            if "lost" in said:
                self._end(said["lost"])
            if "failed" in said:
                self._end(f"{processes.name(int(other))} ended: {said['failed']}")
            before, since = self._heard.get(other, ("", now))
            if sign != before or said["word"] == "done":
                self._heard[other] = (sign, now)
            elif now - since > self._patience:
                self._end(
                    f"{processes.name(int(other))} has given no sign of life for "
                    f"{self._patience} s, since step {said['step']}"
                )

    def _look_at_step(self) -> None:
        if not self._armed or self._told or len(self._took) < 3:
            return
        usual = statistics.median(self._took)
        took = time.monotonic() - self._since
        if took < max(_SLOW * usual, _LEAST_STALL):
            return
        self._told = True
        path = self._run_dir / f"stacks-{processes.index()}.txt"
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"step {self._step} has taken {took:.0f} s; usual are {usual:.3g} s\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"latte: step {self._step} has taken {took:.0f} s, where {usual:.3g} s are usual; "
            f"what every thread does is in {path}",
            file=sys.stderr,
            flush=True,
        )

    def _end_without_first(self) -> None:
        self._end(f"{processes.name(0)}, which coordinates the run, is gone")

    def _end(self, reason: str) -> None:
        print(
            f"latte: {reason}; {processes.name()} stops, and the same command goes on from the "
            "last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        if processes.is_first():
            processes.say_last({"lost": reason})
        os._exit(1)


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]
