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
from latte.data.corpus import find_sources
from latte.data.documents import Survey, survey
from latte.data.manifest import FORMAT, Manifest, SourceRecord, record_files, write_manifest
from latte.data.progress import Progress, show_progress
from latte.data.split import Split, hold_out
from latte.data.store import SPLITS, StreamWriter, TokenStore
from latte.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_sentencepiece,
)
from latte.errors import UserError

CACHE = Path(".cache/latte")
"""Where stores are kept by default, under the working directory."""


def prepare(config: DataConfig, *, progress: Progress | None = None) -> TokenStore:
    """Returns the verified token store of what `config` asks for, prepared before or now.

    Its folder's name follows from the text, the tokenizer and the held-out share. A store is
    written beside its place and renamed when it is whole: a folder of that name is a whole store.

    Args:
      progress: is told how far it is; None shows it on stderr.

    Raises:
      UserError: the corpus cannot be read or is bad, the tokenizer cannot be made, the disk is
        full, or the store that is there is corrupt.
    """
    with contextlib.ExitStack() as stack:
        report = progress or stack.enter_context(show_progress())
        corpus = _survey(config, report)
        cache = Path(config.cache) if config.cache else CACHE
        folder = cache / _store_name(config, corpus)
        with _disk_errors(cache), _lock(cache, folder.name):
            if not folder.exists():
                _write_and_commit(folder, config, corpus, report)
        return TokenStore.open(folder)


def _survey(config: DataConfig, report: Progress) -> Survey:
    sources = find_sources(config)
    total = sum(source.path.stat().st_size for source in sources if source.path.exists())
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        report("reading", done, total)

    corpus = survey(sources, skip_bad=config.skip_bad, progress=advance)
    for left in corpus.left_out:
        if left.bad:
            report.say(f"left out {left.name}: {left.reason}")
    return corpus


def _store_name(config: DataConfig, corpus: Survey) -> str:
    """A readable name and a hash of all that decides what the store holds."""
    decides = {
        "format": FORMAT,
        "documents": [(document.source.name, document.sha256) for document in corpus.documents],
        "tokenizer": _tokenizer_settings(config),
        "heldout": config.heldout,
    }
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(config.path or config.corpus).stem).strip("-")
    return f"{name or 'text'}-{digest[:16]}"


def _tokenizer_settings(config: DataConfig) -> dict[str, Any]:
    if config.tokenizer == "bytes":
        return {"bytes": True}
    if config.tokenizer == "sentencepiece":
        return {"train": config.tokenizer_vocab, "sentencepiece": sentencepiece.__version__}
    return {"model": hashlib.sha256(_read_model(config.tokenizer)).hexdigest()}


def _read_model(path: str) -> bytes:
    if not path.endswith(".model"):
        raise UserError(
            f"--data.tokenizer is {path!r}: give bytes, sentencepiece or the path of a .model file"
        )
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path} ({error.strerror}): correct --data.tokenizer"
        ) from error


def _write_and_commit(folder: Path, config: DataConfig, corpus: Survey, report: Progress) -> None:
    """Writes a store beside its place, where a killed process may have left one, and renames it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _write(partial, config, corpus, report)
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(folder: Path, config: DataConfig, corpus: Survey, report: Progress) -> None:
    """Writes all files of a store, the manifest last."""
    split = hold_out(corpus.documents, config.heldout)
    tokenizer = _make_tokenizer(config, split, report)
    tokenizer.save(folder)
    total = sum(document.size for document in corpus.documents)
    done = 0
    counts = {}
    for name, documents in zip(SPLITS, split, strict=True):
        writer = StreamWriter(folder / name, tokenizer)
        for document in documents:
            writer.add(tokenizer.encode(document.read()), document.size)
            done += document.size
            report("tokenizing", done, total)
        counts[name] = writer.close()
    heldout = {document.source.name: document.size for document in split.heldout}
    manifest = Manifest(
        corpus=config.path or config.corpus,
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        splits=counts,
        sources=[
            SourceRecord(source.name, size, sha256, heldout.get(source.name, 0))
            for source, sha256, _, size in corpus.documents
        ],
        left_out={left.name: left.reason for left in corpus.left_out},
        files=record_files(folder),
    )
    write_manifest(folder, manifest)


def _make_tokenizer(config: DataConfig, split: Split, report: Progress) -> Tokenizer:
    """The tokenizer that the settings ask for; training sees no held-out document."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer != "sentencepiece":
        return SentencePieceTokenizer(_read_model(config.tokenizer))
    total = sum(document.size for document in split.train)

    def texts() -> Iterator[str]:
        done = 0
        for document in split.train:
            yield document.read()
            done += document.size
            report("training the tokenizer", done, total)

    return train_sentencepiece(texts(), total, config.tokenizer_vocab)


@contextlib.contextmanager
def _lock(cache: Path, name: str) -> Iterator[None]:
    """Lets one process at a time prepare a store; the system frees the lock of a killed one."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    """Says in a sentence that the cache cannot be written to."""
    try:
        yield
    except (OSError, ValueError) as error:
        # tensorstore raises ValueError with the system's error number in its message.
        number = re.search(r"os_error_code='(\d+)'", str(error))
        code = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
        if code is None:
            raise
        mend = "free some space or give another folder with --data.cache"
        if code not in (errno.ENOSPC, errno.EDQUOT):
            mend = "give a folder that can be written to with --data.cache"
        raise UserError(f"cannot write to {cache} ({os.strerror(code)}): {mend}") from error


def _sync(path: Path) -> None:
    """Makes sure that a file or folder is on the disk, not only on its way."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
