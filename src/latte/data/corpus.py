"""Where the input files of a corpus are: a file in data/, or a file or folder of the user's own."""

import difflib
import importlib.util
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from latte.config import DataConfig
from latte.data.fetch import WEB, is_url, list_files
from latte.data.records import is_records
from latte.errors import UserError

CORPORA = Path(__file__).resolve().parents[3] / "data"
"""The repository's folder of corpora."""
_HELD_OUT = {"val", "valid", "validation", "test", "heldout", "holdout"}
"""First words of files and folders of records that are there to evaluate on."""


class Source(NamedTuple):
    """An input file.

    name: what it is called in manifests and messages; unique in its corpus and the same on every
        machine.
    path: where it is: a path of this machine, or a gs://, s3:// or https:// URL.
    heldout: whether its documents are all to evaluate on.
    sha256: of its bytes, in hexadecimal, where it is published.
    """

    name: str
    path: str | Path
    heldout: bool = False
    sha256: str = ""


class Corpus(NamedTuple):
    """What is known of a corpus before it is read.

    where: how it was asked for.
    sources: sorted by name.
    subsets: the set names that its documents may have; empty for any.
    weights: published proportions of its subsets, by tokens; empty where there are none.
    """

    where: str
    sources: list[Source]
    subsets: frozenset[str] = frozenset()
    weights: Mapping[str, float] = {}


def find_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config` asks for: its own path, or a file in data/.

    A corpus whose files lie anywhere, which has `sources(root)`, is looked for at the path.

    Raises:
      UserError: the corpus or path does not exist, holds no file, or names two files alike.
    """
    module = _load(config.corpus)
    takes_root = bool(inspect.signature(module.sources).parameters)
    if config.path and not takes_root:
        found = _sorted(config.path, _scan(config.path))
        if all(source.heldout for source in found):  # then their names say nothing
            found = [source._replace(heldout=False) for source in found]
        corpus = Corpus(config.path, found)
    else:
        root = (config.path or module.ROOT).rstrip("/") if takes_root else ""
        found = module.sources(root) if takes_root else module.sources()
        corpus = Corpus(
            config.corpus,
            _sorted(config.corpus, found),
            frozenset(getattr(module, "SUBSETS", ())),
            getattr(module, "WEIGHTS", {}),
        )
    if not corpus.sources:
        raise UserError(
            f"corpus {corpus.where!r} holds no files: give another --data.path or --data.corpus"
        )
    return corpus


def _sorted(where: str, found: Iterable[Source]) -> list[Source]:
    sources = sorted(found, key=lambda source: source.name)
    for one, other in itertools.pairwise(sources):
        if one.name == other.name:
            raise UserError(
                f"corpus {where!r} has two files named {one.name!r}: rename one of them"
            )
    return sources


def _scan(path: str) -> Iterator[Source]:
    """One file, or every file under a folder whose name, and folder, begins with no dot."""
    if not is_url(path) and Path(path).is_file():
        found = {"": ""}
    elif is_url(path) or Path(path).is_dir():
        found = list_files(path)
        if path.startswith(WEB) and not found:  # a server that lists nothing has a lone file there
            found = {"": ""}
    else:
        raise UserError(f"{path} is neither a file nor a folder: correct --data.path")
    for name, sha256 in found.items():
        if not re.search(r"(^|/)\.", name):
            inside = f"{path.rstrip('/')}/{name}" if name else path
            where = inside if is_url(path) else Path(inside)
            yield _source(name or path.rpartition("/")[2], where, sha256)


def _source(name: str, path: str | Path, sha256: str) -> Source:
    """A file of a folder. What a folder of records calls validation or test is held out."""
    words = {re.split(r"[^a-z]+", part.lower())[0] for part in name.split("/")}
    return Source(name, path, is_records(name) and bool(words & _HELD_OUT), sha256)


def _load(corpus: str) -> ModuleType:
    """A corpus file, given by its name in data/ or by its path."""
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
    return module
