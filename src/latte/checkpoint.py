"""Checkpoints: written by Orbax in the background, committed atomically, checked when restored.

A checkpoint holds every array of a pytree under its path, and beside them a fingerprint of each, an
integer sum over its bits that does not depend on how it is sharded. One that is damaged is named,
and the one before it is used.
"""

import contextlib
import errno
import gc
import io
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import Array, PyTree, UInt32

from latte import processes
from latte.errors import RunFailedError, UserError

_log = logging.getLogger(__name__)
logging.getLogger("absl").setLevel(logging.CRITICAL)  # where Orbax prints what it also raises
_FULL_DISK = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota")
"""What storage libraries say of a full disk."""

_UNTIL_READS_END = 0.5
"""Seconds, after a checkpoint was found to be damaged."""


def _names(tree: PyTree) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


@jax.jit
def fingerprints(leaves: list[Array]) -> list[UInt32[Array, ""]]:
    """An integer sum over the bits of each array, however it is spread over devices."""

    def one(x: Array) -> UInt32[Array, ""]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        # Odd multipliers that differ by place, so that exchanged values are noticed; the places of
        # an array that is spread over devices are counted where they are.
        places = jnp.zeros(bits.shape, jnp.uint32)
        for axis, size in enumerate(bits.shape):
            places = places * size + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        return jnp.sum(bits * (2 * places + 1), dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]


@dataclass
class Keep:
    """Which checkpoints stay: the newest, those of steps that `every` divides (0: none), and that
    of the lowest held-out loss that was noted."""

    newest: int
    every: int = 0
    best: int | None = None
    lowest: float = math.inf

    def note(self, step: int, loss: float) -> None:
        """Takes in a held-out loss."""
        if loss < self.lowest:
            self.best, self.lowest = step, loss

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question, of checkpoints in the order of their steps."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        newest = steps[-self.newest :]
        return [
            step in newest or step == self.best or bool(self.every and step % self.every == 0)
            for step in steps
        ]


class Checkpoints:
    """The checkpoints of one run, in `folder`.

    Without `keep`, which says which of them stay, they are only read: another process may be
    writing them. A checkpoint is a dict of pytrees, each of which can be restored alone.
    """

    def __init__(self, folder: str | Path, keep: Keep | None = None):
        self.folder, self._writes = _absolute(folder), keep is not None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep, create=self._writes, cleanup_tmp_directories=self._writes
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, items: dict[str, PyTree]) -> None:
        """Starts to write the state after `step` steps; returns when it is safe to go on."""
        if step in self._manager.all_steps():
            return
        parts = {}
        for item, tree in items.items():
            names, leaves = _names(tree), jax.tree.leaves(tree)
            sums = map(int, fingerprints(leaves))
            parts[item] = ocp.args.StandardSave(dict(zip(names, leaves, strict=True)))
            parts[f"{item}_sums"] = ocp.args.JsonSave(dict(zip(names, sums, strict=True)))
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**parts))

    def wait(self) -> None:
        """Returns when everything that was started is committed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and gives back threads."""
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.close()

    def steps(self) -> list[int]:
        """After which steps there are committed checkpoints, in order."""
        self._manager.reload()  # Orbax counts one that it only began
        return sorted(self._manager.all_steps())

    def restore(self, targets: dict[str, PyTree]) -> tuple[dict[str, PyTree], int] | None:
        """The newest checkpoint that is whole, with the shapes and shardings of `targets`.

        None where there is no checkpoint at all. Damaged ones are put aside once a whole one is
        found: where all fail, the reason may lie elsewhere.

        Raises:
            UserError: there are checkpoints and every one is damaged.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            items = self._try(step, targets)
            if isinstance(items, str):
                damaged[step] = items
                continue
            for worse, reason in damaged.items():
                self._leave_out(worse, reason)
            return items, step
        if damaged:
            raise UserError(
                f"every checkpoint in {self.folder} is damaged (step {max(damaged)}: "
                f"{damaged[max(damaged)]}); start again in another --run-dir"
            )
        return None

    def _try(self, step: int, targets: dict[str, PyTree]) -> dict[str, PyTree] | str:
        """A checkpoint's items, or what is wrong with it; processes agree on which."""
        reason, read = "another process could not read its part", {}
        with _silence():
            try:
                read = {item: self._read(step, item, targets[item]) for item in targets}
            except Exception as error:  # Whatever Orbax and its storage say of a damaged file.
                reason = _reason(error)
            if not processes.all_say(bool(read)):
                # Orbax gave up on the other arrays, and each read prints pages when it ends.
                time.sleep(_UNTIL_READS_END)
                gc.collect()
                return reason
        for leaves, sums in read.values():
            for name, found in zip(leaves, fingerprints(list(leaves.values())), strict=True):
                if int(found) != sums[name]:
                    return f"the bits of {name} are not those that were saved"
        return {
            item: jax.tree.unflatten(jax.tree.structure(targets[item]), list(leaves.values()))
            for item, (leaves, _) in read.items()
        }

    def _read(
        self, step: int, item: str, target: PyTree
    ) -> tuple[dict[str, Array], dict[str, int]]:
        """The arrays of an item by name, and their fingerprints.

        By the handlers themselves: the manager would wait for a process that could not read.
        """
        abstract = dict(zip(_names(target), map(_abstract, jax.tree.leaves(target)), strict=True))
        folder = self.folder / str(step)
        arrays = ocp.StandardCheckpointHandler().restore(
            folder / item, args=ocp.args.StandardRestore(abstract)
        )
        sums = ocp.JsonCheckpointHandler().restore(folder / f"{item}_sums")
        return {name: arrays[name] for name in abstract}, {name: sums[name] for name in abstract}

    def _leave_out(self, step: int, reason: str) -> None:
        """Names a damaged checkpoint, and moves it away where a new one may take its place."""
        moved = ""
        if self._writes:
            place = self.folder.parent / "damaged" / str(step)
            processes.first_alone(partial(_move, self.folder / str(step), place))
            self._manager.reload()
            moved = f"moved to {place}; "
        if not processes.is_first():
            return
        _log.warning(
            "checkpoint %s is damaged (%s): %sthe one before it is used",
            self.folder / str(step),
            reason,
            moved,
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns a write that failed into a sentence that says what is left."""
        try:
            yield
        except Exception as error:
            words = _reason(error)
            code = error.errno if isinstance(error, OSError) else None
            full = code in (errno.ENOSPC, errno.EDQUOT) or any(w in str(error) for w in _FULL_DISK)
            left = self.steps()
            good = f"the last good one is of step {left[-1]}" if left else "there is none yet"
            raise RunFailedError(
                f"a checkpoint could not be written to {self.folder} "
                f"({'the disk is full' if full else words}): {good}; "
                "make room and run the same command again"
            ) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps this process from writing to stderr."""
    logging.disable()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _absolute(folder: str | Path) -> epath.Path:
    """A URL is absolute as it stands."""
    path = epath.Path(folder)
    return path if "://" in str(folder) else path.resolve()


def _move(folder: epath.Path, place: epath.Path) -> None:
    if place.exists():
        place.rmtree()
    place.parent.mkdir(exist_ok=True)
    folder.rename(place)


def _reason(error: BaseException) -> str:
    """What was wrong at first, on one line."""
    while error.__cause__:
        error = error.__cause__
    words = " ".join(str(error).split())
    return words[:200] if words else repr(error)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
