"""Where the input files of a corpus are: a file in data/, or a file or folder of the user's own."""

import difflib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from latte.config import DataConfig
from latte.errors import UserError

CORPORA = Path(__file__).resolve().parents[3] / "data"
"""The repository's folder of corpora."""


class Source(NamedTuple):
    """An input file.

    name: what it is called in manifests and messages; unique in its corpus and the same on every
        machine.
    path: where it is on this machine.
    """

    name: str
    path: Path


def find_sources(config: DataConfig) -> list[Source]:
    """The input files that `config` asks for, sorted by name.

    Raises:
      UserError: the corpus or path does not exist, holds no file, or names two files alike.
    """
    if config.path:
        where, found = config.path, _scan(Path(config.path))
    else:
        where, found = config.corpus, _load(config.corpus)()
    sources = sorted(found)
    if not sources:
        raise UserError(
            f"corpus {where!r} holds no files: give another --data.path or --data.corpus"
        )
    for one, other in itertools.pairwise(sources):
        if one.name == other.name:
            raise UserError(
                f"corpus {where!r} has two files named {one.name!r}: rename one of them"
            )
    return sources


def _scan(path: Path) -> Iterator[Source]:
    """One file, or every regular file under a folder whose name, and folder, begins with no dot."""
    if path.is_file():
        yield Source(path.name, path)
    elif path.is_dir():
        for folder, folders, files in os.walk(path, onerror=_refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(folder, name) for name in files if not name.startswith(".")):
                # A dangling link is kept, so that reading it is what names it; a pipe would hang.
                if file.is_file() or file.is_symlink():
                    yield Source(file.relative_to(path).as_posix(), file)
    else:
        raise UserError(f"{path} is neither a file nor a folder: correct --data.path")


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot list {error.filename}: {error.strerror}") from error


def _load(corpus: str) -> Callable[[], Iterable[Source]]:
    """The function `sources` of a corpus file, given by its name in data/ or by its path."""
    file = Path(corpus) if corpus.endswith(".py") else CORPORA / f"{corpus}.py"
    if not file.is_file():
        known = sorted(each.stem for each in CORPORA.glob("*.py"))
        near = difflib.get_close_matches(corpus, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise UserError(f"no corpus {corpus!r} ({file} does not exist): {hint}")
    spec = importlib.util.spec_from_file_location(f"latte_corpus_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "sources", None)):
        raise UserError(f"{file} defines no function sources(): see data/README.md")
    return module.sources
