"""Who makes the shards: this process, or Ray on all cores of this machine or of a cluster."""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt64

from latte.data.place import disk_error
from latte.data.shard import ShardRecord
from latte.data.task import Input, Job, Work, make_shard, unpack
from latte.errors import UserError

SMALL = 64 << 20
"""Bytes of a corpus up to which this process does it faster than Ray starts."""
_AHEAD = 2
"""Tasks a core that Ray is given before it has done the earlier ones."""


class Engine(NamedTuple):
    """How shards are made.

    address: of a Ray cluster; empty for this machine.
    workers: processes on this machine, 1 for this one alone; 0 for Ray on all cores, if it is
        installed and the corpus is not small.
    """

    address: str = ""
    workers: int = 0


Todo = list[tuple[int, Input]]
"""Inputs whose shards are still to be made, with their numbers."""
Made = Iterator[tuple[int, ShardRecord]]


def make_shards(
    engine: Engine,
    job: Job,
    todo: Todo,
    heldout: UInt64[np.ndarray, " n"],
    size: int,
    progress: Callable[[int], None],
) -> Made:
    """Makes the shards of inputs in any order, and yields each once it is committed.

    Args:
      heldout: sorted hashes of documents that must not be trained on.
      size: bytes of the inputs, by which it is decided whether Ray is worth its start.
      progress: is given the bytes of the inputs that were read.

    Raises:
      UserError: an input is bad, or Ray is missing or cannot be reached.
    """
    cores = len(os.sched_getaffinity(0))
    pays = size > SMALL and cores > 1 and importlib.util.find_spec("ray") is not None
    if len(todo) > 1 and (engine.address or engine.workers > 1 or (engine.workers == 0 and pays)):
        return _with_ray(engine, job, todo, heldout, progress)
    return ((i, make_shard(job, i, item, heldout, progress)) for i, item in todo)


def _with_ray(
    engine: Engine,
    job: Job,
    todo: Todo,
    heldout: UInt64[np.ndarray, " n"],
    progress: Callable[[int], None],
) -> Made:
    # Ray prints what happens to its machines, and stdout is for a program to read.
    with contextlib.redirect_stdout(sys.stderr):
        ray = _start(engine)
        try:
            yield from _submit(ray, job, todo, heldout, progress)
        finally:
            ray.shutdown()


def _submit(
    ray: Any,
    job: Job,
    todo: Todo,
    heldout: UInt64[np.ndarray, " n"],
    progress: Callable[[int], None],
) -> Made:
    """Gives Ray a few tasks more than it has cores, until all are done."""
    # A task whose machine is lost is done again elsewhere, as often as it takes.
    task = ray.remote(max_retries=-1)(_task)
    work = Work(job.place, job.tokenizer.files(), job.share, job.known, job.skip_bad)
    known = ray.put((work, heldout))
    left = iter(todo)
    waiting: set[Any] = set()
    while True:
        room = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while len(waiting) < room and (following := next(left, None)):
            waiting.add(task.remote(known, *following))
        if not waiting:
            return
        done, _ = ray.wait(list(waiting), num_returns=1)
        waiting.difference_update(done)
        for result in ray.get(done):
            if isinstance(result, str):
                raise UserError(result)
            number, record = result
            progress(sum(source.bytes for source in record.sources))
            yield number, record


def _task(known: tuple[Work, np.ndarray], number: int, item: Input) -> tuple | str:
    """One shard, in a process of Ray's; what a user must hear comes back as text."""
    work, heldout = known
    try:
        return number, make_shard(unpack(work), number, item, heldout)
    except UserError as error:
        return str(error)
    except (OSError, ValueError) as error:
        code = disk_error(error)
        if code is None:
            raise
        return f"cannot write to {work.place} ({os.strerror(code)}): free some space, or see --out"


def _start(engine: Engine) -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError(
            "several workers need Ray: pip install 'latte-lm[prepare]', or take --workers 1"
        ) from error
    where: dict[str, Any] = (
        {"address": engine.address}
        if engine.address
        else {
            "address": "local",
            "num_cpus": engine.workers or None,
            "include_dashboard": False,
        }
    )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        words = " ".join(str(error).split())[:200]
        raise UserError(
            f"no Ray cluster at {engine.address or 'this machine'} ({words}): correct --ray, start "
            "one with `ray start --head`, or set RAY_AUTH_TOKEN to its token"
        ) from error
    return ray
