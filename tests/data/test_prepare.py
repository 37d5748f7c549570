"""A store is whole or absent, and says what is wrong with it."""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from latte.config import DataConfig
from latte.data.manifest import Count
from latte.data.prepare import prepare
from latte.data.shard import SourceRecord
from latte.data.store import TokenStore
from latte.data.tokenizer import train_sentencepiece
from latte.errors import UserError


def digest(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def sources_of(store: TokenStore) -> list[SourceRecord]:
    """The input files of a store."""
    return [source for record in store.records for source in record.sources]


def texts(store: TokenStore, split: str) -> list[str]:
    """Every document of a split, decoded."""
    [stream] = store.split(split)
    tokens = stream.read(np.asarray([0]), len(stream))[0]
    assert all(tokens[stream.offsets[:-1]] == store.tokenizer.separator)
    parts = [tokens[a:b] for a, b in zip(stream.offsets[:-1], stream.offsets[1:], strict=True)]
    return [store.tokenizer.decode(part) for part in parts]


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_a_store_holds_every_document_and_counts_it(corpus, tmp_path, tokenizer):
    config = DataConfig(
        path=str(corpus),
        tokenizer=tokenizer,
        tokenizer_vocab=300,
        heldout=0.2,
        cache=str(tmp_path),
    )
    store = prepare(config)
    held = {source.name: source.heldout_bytes for source in sources_of(store)}
    for split in ("train", "heldout"):
        names = sorted(name for name, size in held.items() if bool(size) == (split == "heldout"))
        expected = [(corpus / name).read_text() for name in names]
        assert texts(store, split) == expected
        [stream] = store.split(split)
        sizes = [len(text.encode()) for text in expected]
        assert stream.sizes.tolist() == sizes
        assert store.manifest.splits[split] == Count(len(stream), len(expected), sum(sizes))
    for source in sources_of(store):
        data = (corpus / source.name).read_bytes()
        assert source.sha256 == hashlib.sha256(data).hexdigest()
        assert source.bytes == len(data)
        assert source.heldout_bytes in (0, len(data))
    assert store.tokenizer.fingerprint == store.manifest.fingerprint


def test_a_trained_tokenizer_has_seen_no_held_out_document(corpus, tmp_path):
    store = prepare(DataConfig(path=str(corpus), tokenizer_vocab=300, cache=str(tmp_path)))
    train = texts(store, "train")
    size = store.manifest.splits["train"].bytes
    again = train_sentencepiece(train, size, 300)
    assert again.fingerprint == store.tokenizer.fingerprint


def test_a_model_file_may_be_the_tokenizer(corpus, tmp_path):
    text = Path(__file__).read_text()
    tokenizer = train_sentencepiece([text], len(text), 400)
    tokenizer.save(tmp_path)
    config = DataConfig(
        path=str(corpus), tokenizer=str(tmp_path / "tokenizer.model"), cache=str(tmp_path)
    )
    store = prepare(config)
    assert store.tokenizer.fingerprint == tokenizer.fingerprint
    for wrong, message in (
        ("byte", "give bytes, sentencepiece, the path"),
        ("x.model", "cannot read"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(dataclasses.replace(config, tokenizer=wrong))


def test_a_store_is_made_once_and_anew_when_anything_that_decides_it_changes(
    bytes_config, corpus, tmp_path
):
    folder = prepare(bytes_config).place.folder
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert prepare(bytes_config).place.folder == folder
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    copy = shutil.copytree(corpus, tmp_path / corpus.name)
    moved = dataclasses.replace(bytes_config, path=str(copy))
    assert prepare(moved).place.folder == folder
    (copy / "new.txt").write_text("new")
    for other in (
        moved,
        dataclasses.replace(bytes_config, heldout=0.1),
        dataclasses.replace(bytes_config, tokenizer="sentencepiece", tokenizer_vocab=300),
    ):
        assert prepare(other).place.folder != folder


def test_a_lone_file_keeps_its_end_as_held_out(tmp_path, make_folder):
    text = "All the world's a stage.\n" * 40
    folder = make_folder({"play.txt": text.encode()})
    config = DataConfig(
        path=str(folder / "play.txt"), tokenizer="bytes", heldout=0.1, cache=str(tmp_path / "c")
    )
    store = prepare(config)
    assert texts(store, "train") == [text[:900]]
    assert texts(store, "heldout") == [text[900:]]
    assert sources_of(store)[0].heldout_bytes == 100


def test_bad_files_are_named_on_stderr_and_in_the_manifest(tmp_path, make_folder, capfd):
    folder = make_folder({"a.txt": b"fine", "b.txt": b"\xff", "c.txt": b"good", "d.txt": b""})
    config = DataConfig(
        path=str(folder), tokenizer="bytes", heldout=0.5, skip_bad=1, cache=str(tmp_path / "c")
    )
    manifest = prepare(config).manifest
    assert "left out b.txt: not UTF-8 at byte 0" in capfd.readouterr().err
    assert manifest.left_out == {"b.txt": "not UTF-8 at byte 0", "d.txt": "empty"}
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 at byte 0"):
        prepare(dataclasses.replace(config, skip_bad=0))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "corrupt": (flip, "shards/00000/tokens/c/0", "tokens/c/0 is corrupt"),
    "truncated": (
        lambda file: os.truncate(file, 100),
        "shards/00000/tokens/c/0",
        "tokens/c/0 has 100 bytes, not",
    ),
    "missing": (Path.unlink, "shards/00000/documents/c/0/0", "documents/c/0/0 is missing"),
    "no manifest": (Path.unlink, "manifest.json", "manifest.json is missing"),
    "half a manifest": (
        lambda file: os.truncate(file, 500),
        "manifest.json",
        "manifest.json cannot be read",
    ),
    "edited manifest": (
        lambda file: file.write_text(file.read_text().replace('"documents": ', '"documents": 1')),
        "manifest.json",
        "manifest.json was changed",
    ),
    "another manifest": (
        lambda file: file.write_text(json.dumps({"checksum": "", "format": 0})),
        "manifest.json",
        "manifest.json has format 0",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_named_with_the_mend(bytes_config, damage):
    folder = prepare(bytes_config).place.folder
    do, name, message = DAMAGE[damage]
    do(folder / name)
    with pytest.raises(UserError, match=message) as error:
        prepare(bytes_config)
    assert f"delete the folder {folder} and prepare the corpus again" in str(error.value)
    shutil.rmtree(folder)
    assert prepare(bytes_config).place.folder == folder


def test_a_tokenizer_that_does_not_match_is_refused(store):
    assert TokenStore.open(store.place.folder, fingerprint=store.tokenizer.fingerprint)
    with pytest.raises(UserError, match="made by another tokenizer"):
        TokenStore.open(store.place.folder, fingerprint="0" * 64)


PROGRAM = """
import os, signal, sys
from latte.config import DataConfig
from latte.data.prepare import prepare

class Progress:
    left = int(sys.argv[3])
    def __call__(self, stage, done, total):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

print("ready", flush=True)
config = DataConfig(path=sys.argv[1], cache=sys.argv[2], tokenizer_vocab=300, heldout=0.1)
prepare(config, progress=Progress())
"""


def prepare_command(corpus: Path, cache: Path, kill_after: int = 0) -> list[str]:
    """Prepares in another process, which kills itself after so many reports of progress."""
    return [sys.executable, "-c", PROGRAM, str(corpus), str(cache), str(kill_after)]


def test_killed_at_any_moment_and_run_again_the_store_is_the_same(corpus, tmp_path):
    with subprocess.Popen(
        prepare_command(corpus, tmp_path / "whole"), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = time.monotonic()
        assert process.wait() == 0
        seconds = time.monotonic() - start
    cache = tmp_path / "killed"
    # 40 reports while reading, at least 30 while training, 40 while writing the store; a tokenizer
    # that was trained once is not trained again.
    for reports in (1, 41, 60, 85, 70):
        command = prepare_command(corpus, cache, reports)
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
        assert not list(cache.glob("corpus*"))
    assert list(cache.glob(".*.partial"))
    chance = random.Random()
    for _ in range(4):
        with subprocess.Popen(prepare_command(corpus, cache), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.uniform(0, seconds))
            process.kill()
        for folder in cache.glob("corpus*"):
            TokenStore.open(folder)
    subprocess.run(prepare_command(corpus, cache), check=True, capture_output=True)
    (whole,) = (tmp_path / "whole").glob("corpus*")
    (again,) = cache.glob("corpus*")
    assert digest(again) == digest(whole)
    assert not list(cache.glob(".*.partial"))


def test_two_processes_at_once_make_one_store(corpus, tmp_path):
    command = prepare_command(corpus, tmp_path)
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(tmp_path.glob("corpus*"))) == 1


@pytest.mark.parametrize("kilobytes", [32, 64, 96])
def test_a_full_disk_is_said_and_leaves_nothing(bytes_config, tmp_path, kilobytes):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is refused")
    try:
        config = dataclasses.replace(bytes_config, cache=str(disk / "cache"))
        with pytest.raises(UserError, match=r"No space left on device.*--data\.cache"):
            prepare(config)
        assert [file.suffix for file in (disk / "cache").iterdir()] == [".lock"]
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        assert digest(prepare(config).place.folder) == digest(prepare(bytes_config).place.folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_cache_that_cannot_be_written_to_is_named(bytes_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file/cache \(Not a directory\)"):
        prepare(dataclasses.replace(bytes_config, cache=str(tmp_path / "file" / "cache")))


def test_progress_reaches_the_end_of_every_stage(bytes_config):
    class Seen:
        def __init__(self):
            self.stages: dict[str, list[tuple[int, int]]] = {}

        def __call__(self, stage: str, done: int, total: int) -> None:
            self.stages.setdefault(stage, []).append((done, total))

        def say(self, line: str) -> None:
            raise AssertionError(line)

    seen = Seen()
    prepare(
        dataclasses.replace(bytes_config, tokenizer="sentencepiece", tokenizer_vocab=300),
        progress=seen,
    )
    assert list(seen.stages) == ["reading", "training the tokenizer", "tokenizing"]
    for calls in seen.stages.values():
        assert calls == sorted(calls)
        assert calls[-1][0] == calls[-1][1]
