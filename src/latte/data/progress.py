"""How far a long task is: a bar on a terminal, plain lines elsewhere."""

import contextlib
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

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            self.say(f"{stage}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
