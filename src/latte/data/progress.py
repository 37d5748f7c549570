"""How far a long task is: a bar on a terminal, plain lines elsewhere."""

import contextlib
import datetime
import sys
import time
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import rich.console
import rich.progress

_SECONDS_BETWEEN_LINES = 5


@runtime_checkable
class Progress(Protocol):
    """Is told how far a task is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a stage are done."""

    def say(self, line: str) -> None:
        """Shows a line to the user."""


class Stage:
    """A stage of a task, which adds up what is done of it."""

    def __init__(self, report: Progress, name: str, total: int):
        self._report, self._name = report, name
        self._done, self._total = 0, total

    def advance(self, size: int) -> None:
        """`size` more bytes are done. Where the total was not known it grows with them."""
        self._done += size
        self._total = max(self._total, self._done)
        self._report(self._name, self._done, self._total)

    def expect(self, part: int, whole: int) -> None:
        """`part` of `whole` pieces of about the same size are done: so large is all of it."""
        self._total = max(self._done, self._done * whole // part)


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """Shows progress on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        yield _Bar(bar)


class _Bar(Progress):
    def __init__(self, bar: rich.progress.Progress):
        self._bar = bar
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage)
        self._bar.update(self._tasks[stage], completed=done, total=total)

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)


class _Lines(Progress):
    """A line every few seconds; what takes less time says nothing."""

    def __init__(self):
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
        self._stage, self._start, self._before = "", time.monotonic(), 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._start, self._before = stage, now, done
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            speed = max(1.0, (done - self._before) / max(now - self._start, 1e-3))
            left = str(datetime.timedelta(seconds=round((total - done) / speed)))
            self.say(
                f"{stage}: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s, "
                f"{left} left"
            )

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
