"""A run on the terminal: a progress bar where there is one, plain lines elsewhere."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows steps, loss, tokens/s, MFU where it is known, and the time left."""

    def __init__(
        self, name: str, steps: int, first: int, every: int, console: Console | None = None
    ) -> None:
        """`first` of `steps` are done already; without a terminal each `every`-th one is a line."""
        self._console = console or Console(highlight=False, markup=False)
        self._steps, self._every = steps, every
        self._bar = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn())
            self._bar = Bar(
                *columns,
                TextColumn("{task.fields[text]}"),
                console=self._console,
                refresh_per_second=2,
                expand=True,
            )
            self._task = self._bar.add_task(name, total=steps, completed=first, text="compiling")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, values: Mapping[str, Any], seconds_left: float | None) -> None:
        """Reports that `step` is done."""
        text = _text(values, seconds_left)
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif step % self._every == 0 or step == self._steps:
            self.say(f"step {step}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _text(values: Mapping[str, Any], seconds_left: float | None) -> str:
    parts = []
    if "loss" in values:
        parts.append(f"loss {values['loss']:.4f}")
    if "tokens_per_second" in values:
        parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    if seconds_left is not None:
        parts.append(f"{_duration(seconds_left)} left")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
