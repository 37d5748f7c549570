"""Run directories at a URL, such as gs://BUCKET/runs/NAME: a copy on this host of all but the
checkpoints.

The small files of a run are appended to, cut and replaced, which object stores cannot do: they lie
in a folder of this host, and those that have changed are copied to the URL before a checkpoint is
written, and at the end. Checkpoints are written to the URL itself. A host that is new to a run
copies its files from there first, so that nothing is lost with a host.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from latte.errors import UserError

_COPIES = Path(".cache/latte/runs")
_MARK = "remote"
"""The file of a copy that holds its URL."""
_THERE = ("checkpoints", "damaged")
"""What is at the URL alone."""

_sent: dict[Path, tuple[int, int]] = {}
"""Time of change and size of every file as it was sent last."""


def fetch(url: str) -> Path:
    """This host's copy of a run directory at a URL, made now; an empty one where there is no run.

    Raises:
        UserError: the URL cannot be read.
    """
    url = url.rstrip("/")
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    folder = _COPIES / name
    folder.mkdir(parents=True, exist_ok=True)
    with _errors(url):
        store, root = fsspec.core.url_to_fs(url)
        for path in store.find(root) if store.exists(root) else ():
            relative = path.removeprefix(root).lstrip("/")
            if relative.partition("/")[0] in _THERE:
                continue
            place = folder / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(path, str(place))
    (folder / _MARK).write_text(url, encoding="utf-8")
    return folder


def remote(run_dir: Path) -> str | None:
    """The URL that a run directory is a copy of; None for one that is itself."""
    mark = run_dir / _MARK
    return mark.read_text(encoding="utf-8") if mark.exists() else None


def shown(run_dir: Path) -> str:
    """A run directory as who started the run knows it."""
    return remote(run_dir) or str(run_dir)


def checkpoint_folder(run_dir: Path) -> str:
    """Where the checkpoints of a run are."""
    url = remote(run_dir)
    # Orbax knows gs:// and s3://, and paths.
    return f"{url.removeprefix('file://')}/checkpoints" if url else str(run_dir / "checkpoints")


def send(run_dir: Path) -> None:
    """Copies what has changed to the URL, if there is one.

    Raises:
        UserError: the URL cannot be written to.
    """
    url = remote(run_dir)
    if url is None:
        return
    with _errors(url):
        store, root = fsspec.core.url_to_fs(url)
        for path in sorted(run_dir.rglob("*")):
            relative = path.relative_to(run_dir)
            state = path.stat()
            known = state.st_mtime_ns, state.st_size
            if not path.is_file() or relative.name == _MARK or _sent.get(path) == known:
                continue
            target = f"{root}/{relative.as_posix()}"
            store.makedirs(target.rpartition("/")[0], exist_ok=True)
            store.put_file(str(path), target)
            _sent[path] = known


@contextlib.contextmanager
def _errors(url: str) -> Iterator[Any]:
    """Turns whatever a store says into a sentence that names the URL."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{url} needs a package that is not installed ({error}); "
            "pip install 'latte-lm[gcs]' brings that for gs://"
        ) from error
    except Exception as error:  # Each kind of store has errors of its own.
        words = " ".join(str(error).split())[:200] or repr(error)
        raise UserError(
            f"the run directory {url} cannot be reached ({words}); check its name, and that this "
            "machine may read and write there"
        ) from error
