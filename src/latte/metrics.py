"""What a run reports: metrics.jsonl, TensorBoard, Weights & Biases and the terminal.

metrics.jsonl is the record that counts: one JSON object a line, {"step": 12, "loss": 3.5, …},
floats in the shortest form that reads back to the same bits, so that two runs can be compared
exactly. A value that is not finite is written as null, because JSON has no other word for it.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console

from latte import environment
from latte.config import Config
from latte.errors import UserError
from latte.progress import Progress


class Metrics:
    """Reports a run, into its directory and on the terminal. A context manager.

    `done` is the number of steps that the run has done already: lines of later steps, which a
    killed process left behind, are dropped, and `last` is the record before them. Only one process
    of a run may hold one.
    """

    def __init__(
        self, run_dir: Path, config: Config, done: int = 0, console: Console | None = None
    ) -> None:
        train = config.train
        self._every, self._steps = train.log_every, train.steps
        self._tokens = train.batch_size * train.sequence_length
        self._wandb = _start_wandb(run_dir, config) if train.wandb else None
        run_dir.mkdir(parents=True, exist_ok=True)
        with naming_a_full_disk(run_dir):
            environment.append(run_dir / "environment.json")
            self.last = truncate_after(run_dir / "metrics.jsonl", done)
            self._lines = JsonLines(run_dir / "metrics.jsonl")
            self._events = _start_tensorboard(run_dir, done) if train.tensorboard else None
        self._progress = Progress(config.name, train.steps, done, train.log_every, console)

    def __enter__(self) -> "Metrics":
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        self._lines.close()
        if self._events:
            self._events.close()
        if self._wandb:
            self._wandb.finish(exit_code=int(error is not None))

    def log_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Reports a training step: loss and whatever else; counts from 1.

        Each step is a line of metrics.jsonl; the others get every `train.log_every`-th.
        """
        plain = _plain(values)
        self._lines.write(step, plain)
        if step % self._every == 0 or step == self._steps:
            self._share(step, plain)
        speed = plain.get("tokens_per_second")
        left = (self._steps - step) * self._tokens / speed if speed else None
        self._progress.step(step, values, left)

    def log_eval(self, step: int, values: Mapping[str, Any]) -> None:
        """Reports an evaluation after `step`; `plots.loss_curve` reads heldout_loss and
        heldout_bits_per_byte."""
        plain = _plain(values)
        self._lines.write(step, plain)
        self._share(step, plain)

    def say(self, text: str) -> None:
        """Prints a line for the person who watches."""
        self._progress.say(text)

    def sync(self) -> None:
        """Returns when all that was reported is on the disk: call before a checkpoint commits."""
        self._lines.sync()
        if self._events:
            self._events.flush()

    def _share(self, step: int, values: Mapping[str, Any]) -> None:
        """To TensorBoard and W&B; lists (a value a layer) become name/0, name/1, …"""
        scalars = {}
        for name, value in values.items():
            many = (
                {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {}
            )
            scalars |= many or {name: value}
        scalars = {k: v for k, v in scalars.items() if isinstance(v, int | float)}
        if self._events:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(scalars, step=step)


class NoMetrics:
    """What the processes of a run keep that are not the first one: nothing."""

    last: Mapping[str, Any] = MappingProxyType({})

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def log_step(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def log_eval(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def sync(self) -> None:
        pass


class JsonLines:
    """Appends records to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        with naming_a_full_disk(self._path):
            data = line.encode()
            while data:  # a write to a disk that is nearly full may be short
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Returns when every line is on the disk."""
        with naming_a_full_disk(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, up to the first line that a kill has torn."""
    with path.open("rb") as lines:
        for line in lines:
            record = _parse(line)
            if record is None:
                return
            yield record


def heldout_losses(path: Path, done: int) -> Iterator[tuple[int, float]]:
    """(step, held-out loss) of the evaluations of the first `done` steps."""
    records = read_metrics(path) if path.exists() else iter(())
    for record in records:
        if "heldout_loss" in record and record["step"] <= done:
            yield record["step"], record["heldout_loss"]


def truncate_after(path: Path, step: int) -> dict[str, Any]:
    """Cuts the file before its first line of a later step, or torn one, so that a run can go on.

    Returns the last record that is left; {} where there is none.
    """
    last: dict[str, Any] = {}
    if not path.exists():
        return last
    with path.open("r+b") as file:
        end = 0
        for line in file:
            record = _parse(line)
            if record is None or record["step"] > step:
                break
            last = record
            end += len(line)
        file.truncate(end)
        os.fsync(file.fileno())
    return last


@contextlib.contextmanager
def naming_a_full_disk(path: Path) -> Iterator[None]:
    """Turns the system's «no space left» into a sentence that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the disk that holds {path} is full; free some room and run the same command again, "
            "it goes on from the last checkpoint"
        ) from error


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    """A JAX or NumPy value, or a list of them, as plain Python; None where it is not finite."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_number(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_tensorboard(run_dir: Path, done: int) -> Any:
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=done + 1)


def _start_wandb(run_dir: Path, config: Config) -> Any:
    """The run on Weights & Biases; its id stays in the run directory, so that it can go on."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "train.wandb is set, but wandb is not installed; pip install 'latte-lm[wandb]'"
        ) from None
    kept = run_dir / "wandb_id"
    run_dir.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex)
    return wandb.init(
        project=config.train.wandb,
        name=config.name,
        id=kept.read_text(),
        resume="allow",
        config=dataclasses.asdict(config),
        dir=str(run_dir),
    )
