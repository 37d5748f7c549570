"""From a corpus to a token store: the one prepared before, or a new one, committed whole."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from latte.config import DataConfig
from latte.data.build import Plan, build
from latte.data.engine import Engine
from latte.data.inputs import Found, find_inputs, identity
from latte.data.manifest import FORMAT
from latte.data.place import Place, disk_error, sync
from latte.data.progress import Progress, show_progress
from latte.data.sample import training_texts
from latte.data.store import TokenStore
from latte.data.tokenizer import Tokenizer, open_tokenizer, train_sentencepiece
from latte.errors import UserError

CACHE = Path(".cache/latte")
"""Where stores are kept by default, under the working directory."""


def prepare(config: DataConfig, *, progress: Progress | None = None) -> TokenStore:
    """Returns the verified token store of what `config` asks for, prepared before or now.

    Its folder's name follows from the text, the tokenizer and the held-out share. A store is
    written beside its place and renamed when it is whole: a folder of that name is a whole store.
    What a killed process had done of it is not done again. This process does it alone: for more
    text than that takes minutes, `prepare_at` is there.

    Args:
      progress: is told how far it is; None shows it on stderr.

    Raises:
      UserError: the corpus cannot be read or is bad, the tokenizer cannot be made, the disk is
        full, or the store that is there is corrupt.
    """
    if config.store:
        return TokenStore.open(config.store)
    with contextlib.ExitStack() as stack:
        report = progress or stack.enter_context(show_progress())
        found = find_inputs(config, report)
        cache = Path(config.cache) if config.cache else CACHE
        folder = cache / _store_name(config, found)
        mend = "--data.cache"
        with _disk_errors(cache, mend), _lock(folder):
            if not folder.exists():
                _build_and_rename(folder, config, found, report)
        return TokenStore.open(folder)


def prepare_at(
    config: DataConfig, where: str, engine: Engine, *, progress: Progress | None = None
) -> TokenStore:
    """Makes the store of what `config` asks for in a folder or at a URL, or what is missing of it.

    Raises:
      UserError: as `prepare`, or another store was begun there.
    """
    place = Place(where)
    with contextlib.ExitStack() as stack:
        report = progress or stack.enter_context(show_progress())
        stack.enter_context(_disk_errors(where, "--out"))
        if place.is_local:
            stack.enter_context(_lock(place.folder))
        found = find_inputs(config, report)
        _build(place, config, found, engine, report)
    return TokenStore.open(where)


def _store_name(config: DataConfig, found: Found) -> str:
    """A readable name and a hash of all that decides what the store holds."""
    decides = {
        "format": FORMAT,
        "documents": [identity(item, read=True) for item in found.inputs],
        "tokenizer": _tokenizer_settings(config),
        "heldout": config.heldout,
    }
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(config.path or config.corpus).stem).strip("-")
    return f"{name or 'text'}-{digest[:16]}"


def _tokenizer_settings(config: DataConfig) -> dict[str, Any]:
    if config.tokenizer == "sentencepiece":
        return {"train": config.tokenizer_vocab, "sentencepiece": sentencepiece.__version__}
    return {"fingerprint": open_tokenizer(config.tokenizer).fingerprint}


def _build_and_rename(folder: Path, config: DataConfig, found: Found, report: Progress) -> None:
    """Makes a store beside its place, where a killed process may have left a part of it."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        _build(Place(str(partial)), config, found, Engine(workers=1), report)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except (OSError, ValueError) as error:
        if disk_error(error):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _build(
    place: Place, config: DataConfig, found: Found, engine: Engine, report: Progress
) -> None:
    plan = Plan(
        corpus=config.path or config.corpus,
        inputs=[identity(item, read=False) for item in found.inputs],
        tokenizer=_tokenizer_settings(config),
        heldout=config.heldout,
        weights=dict(found.corpus.weights),
        left_out={left.name: left.reason for left in found.left_out},
    )

    def make_tokenizer() -> Tokenizer:
        if config.tokenizer != "sentencepiece":
            return open_tokenizer(config.tokenizer)
        weights = dict(found.corpus.weights)
        texts, characters = training_texts(found, weights, report)
        return train_sentencepiece(texts, characters, config.tokenizer_vocab)

    build(place, plan, found, make_tokenizer, engine, config.skip_bad, report)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time prepare a store; the system frees the lock of a killed one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors(where: object, setting: str) -> Iterator[None]:
    """Says in a sentence that a folder cannot be written to."""
    try:
        yield
    except (OSError, ValueError) as error:
        code = disk_error(error)
        if code is None:
            raise
        mend = f"free some space or give another folder with {setting}"
        if code not in (errno.ENOSPC, errno.EDQUOT):
            mend = f"give a folder that can be written to with {setting}"
        raise UserError(f"cannot write to {where} ({os.strerror(code)}): {mend}") from error
