"""Stores of records: what is in them, what is done again, and that nothing bad looks whole."""

import dataclasses
import hashlib
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from latte.config import DataConfig
from latte.data.engine import Engine
from latte.data.place import Place
from latte.data.prepare import prepare_at
from latte.data.store import TokenStore
from latte.data.verify import verify
from latte.errors import UserError
from tests.data.recordfiles import books, line, write, zst

ALONE = Engine(workers=1)


def make_corpus(folder: Path, files: int = 4, rows: int = 60) -> dict[str, list]:
    """Files of records of three sets, the last one to evaluate on."""
    made = {}
    for i in range(files):
        name = "val.jsonl.zst" if i == files - 1 else f"train/{i:02}.jsonl.zst"
        made[name] = books(rows, first=i * rows)
        write(folder / name, made[name])
    return made


@pytest.fixture
def corpus(tmp_path) -> Path:
    make_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture
def config(corpus) -> DataConfig:
    return DataConfig(path=str(corpus), tokenizer="bytes")


def digest(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def texts(store: TokenStore, split: str) -> dict[str, list[str]]:
    """Every document of a split, decoded, by subset."""
    found = {}
    for stream in store.split(split):
        tokens = stream.read(np.asarray([0]), len(stream))[0]
        edges = stream.offsets
        assert all(tokens[edges[:-1]] == store.tokenizer.separator)
        parts = [tokens[a:b] for a, b in itertools.pairwise(edges)]
        found[stream.subset] = [store.tokenizer.decode(part) for part in parts]
        assert [len(text.encode()) for text in found[stream.subset]] == stream.sizes.tolist()
    return found


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_a_store_holds_every_document_by_subset_in_order(tmp_path, tokenizer):
    made = make_corpus(tmp_path / "corpus")
    config = DataConfig(path=str(tmp_path / "corpus"), tokenizer=tokenizer, tokenizer_vocab=300)
    store = prepare_at(config, str(tmp_path / "out"), ALONE)
    for split in ("train", "heldout"):
        rows = [
            row
            for name, rows in made.items()
            if (name[0] == "v") == (split == "heldout")
            for row in rows
        ]
        expected = {name: [text for text, of in rows if of == name] for name in "ABC"}
        assert texts(store, split) == expected
        for name, some in expected.items():
            count = store.manifest.subsets[split][name]
            assert (count.documents, count.bytes) == (len(some), sum(len(t.encode()) for t in some))
    assert store.manifest.shards == 4
    for record, name in zip(store.records, sorted(made), strict=True):
        [source] = record.sources
        content = (tmp_path / "corpus" / name).read_bytes()
        assert source.name == name
        assert (source.bytes, source.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_what_is_there_is_not_made_again(config, tmp_path):
    out = tmp_path / "out"
    prepare_at(config, str(out), ALONE)
    whole = digest(out)
    shutil.rmtree(out / "shards/00002")
    (out / "manifest.json").unlink()
    before = {file: file.stat().st_mtime_ns for file in (out / "shards").rglob("*")}
    prepare_at(config, str(out), ALONE)
    assert digest(out) == whole
    for file, changed in before.items():
        assert file.stat().st_mtime_ns == changed or file.name == "shards"


def test_another_store_is_not_begun_in_its_place(config, corpus, tmp_path):
    prepare_at(config, str(tmp_path / "out"), ALONE)
    for other, key in (
        (dataclasses.replace(config, heldout=0.1), "heldout"),
        (dataclasses.replace(config, tokenizer="sentencepiece"), "tokenizer"),
    ):
        with pytest.raises(UserError, match=rf"was begun with another {key}.*--out"):
            prepare_at(other, str(tmp_path / "out"), ALONE)
    write(corpus / "train/99.jsonl", books(3, first=1000))
    with pytest.raises(UserError, match="was begun with another inputs"):
        prepare_at(config, str(tmp_path / "out"), ALONE)


def hashes(store: TokenStore, split: str) -> set[str]:
    return {
        hashlib.sha256(text.encode()).hexdigest()
        for some in texts(store, split).values()
        for text in some
    }


def test_no_held_out_document_is_trained_on(tmp_path):
    """Copies of held-out documents are in the training files, in another set and file format."""
    held, rest = books(40), books(200, first=40)
    write(tmp_path / "corpus/val.jsonl.zst", held)
    write(tmp_path / "corpus/a.jsonl.gz", rest[:100] + [(text, "C") for text, _ in held[:25]])
    write(tmp_path / "corpus/b.parquet", held[20:30] + rest[100:])
    config = DataConfig(path=str(tmp_path / "corpus"), tokenizer="bytes")
    store = prepare_at(config, str(tmp_path / "out"), ALONE)
    train, heldout = hashes(store, "train"), hashes(store, "heldout")
    assert len(heldout) == 40
    assert len(train) == 200
    assert not train & heldout
    assert store.manifest.copies == 35


def test_a_share_of_the_documents_is_held_out_by_their_hash(tmp_path):
    rows = books(1000)
    write(tmp_path / "corpus/a.jsonl", rows[:600] + rows[:300])  # copies of documents, too
    write(tmp_path / "corpus/b.jsonl.zst", rows[500:])
    config = DataConfig(path=str(tmp_path / "corpus"), tokenizer="bytes", heldout=0.2)
    store = prepare_at(config, str(tmp_path / "out"), ALONE)
    train, heldout = hashes(store, "train"), hashes(store, "heldout")
    assert not train & heldout
    assert len(train) + len(heldout) == 1000
    assert len(heldout) == pytest.approx(200, abs=40)


BAD = {
    "not JSON": (b"{nonsense}\n", "not JSON"),
    "no text": (b"{}\n", 'no "text"'),
    "empty": (b'{"text": ""}\n', 'an empty "text"'),
    "UTF-8": (b'{"text": "\xff"}\n', "not UTF-8"),
    "NUL": (b'{"text": "\\u0000"}\n', "a NUL"),
}


def test_bad_documents_are_named_and_left_out_only_so_many(config, corpus, tmp_path, capfd):
    lines = [line(*row) for row in books(10, first=5000)]
    for i, (bad, _) in enumerate(BAD.values()):
        lines.insert(2 * i + 1, bad)
    (corpus / "train/bad.jsonl").write_bytes(b"".join(lines))
    cut = zst(b"".join(line(*row) for row in books(500, first=6000)))
    (corpus / "train/cut.jsonl.zst").write_bytes(cut[: len(cut) // 2])
    for allowed in (0, 4, 5):
        some = dataclasses.replace(config, skip_bad=allowed)
        with pytest.raises(UserError, match=rf"bad documents: .*{allowed}\)") as error:
            prepare_at(some, str(tmp_path / "out"), ALONE)
        assert "train/bad.jsonl:2 (not JSON" in str(error.value)
        with pytest.raises(UserError, match=r"manifest\.json is missing"):
            TokenStore.open(tmp_path / "out")
    store = prepare_at(dataclasses.replace(config, skip_bad=6), str(tmp_path / "out"), ALONE)
    left = store.manifest.left_out
    for i, (_, reason) in enumerate(BAD.values()):
        assert left[f"train/bad.jsonl:{2 * i + 2}"].startswith(reason)
    [where] = [name for name in left if "cut" in name]
    assert left[where] == "the zst file is truncated"
    assert len(left) == 6
    assert f"left out {where}: the zst file is truncated" in capfd.readouterr().err


def test_two_files_with_the_same_content_count_once(config, corpus, tmp_path):
    shutil.copy(corpus / "train/01.jsonl.zst", corpus / "train/77.jsonl.zst")
    with pytest.raises(UserError, match=r"train/77.jsonl.zst \(a copy of train/01.jsonl.zst\)"):
        prepare_at(config, str(tmp_path / "out"), ALONE)
    store = prepare_at(dataclasses.replace(config, skip_bad=1), str(tmp_path / "out"), ALONE)
    assert store.manifest.splits["train"].documents == 180
    assert store.manifest.left_out == {"train/77.jsonl.zst": "a copy of train/01.jsonl.zst"}


def test_an_unknown_set_of_a_known_corpus_is_named(tmp_path):
    for i in range(30):
        write(tmp_path / f"pile/train/{i:02}.jsonl.zst", [(f"text {i}", "ArXiv")])
    for name in ("val", "test"):
        write(tmp_path / f"pile/{name}.jsonl.zst", [(name, "FreeLaw"), (name + name, "Freelaw")])
    config = DataConfig(corpus="pile", path=str(tmp_path / "pile"), tokenizer="bytes")
    with pytest.raises(UserError, match=r"test.jsonl.zst:2 \(an unknown set name 'Freelaw'\)"):
        prepare_at(config, str(tmp_path / "out"), ALONE)


DAMAGE = {
    "a missing shard": ("shards/00001", shutil.rmtree, "shards/00001/.* is missing"),
    "a missing file": ("shards/00002/tokens/c/0", Path.unlink, "tokens/c/0 is missing"),
    "a cut file": ("shards/00002/rows.npy", lambda f: os.truncate(f, 9), "rows.npy has 9 bytes"),
    "an edited manifest": (
        "manifest.json",
        lambda f: f.write_text(f.read_text().replace('"copies": 0', '"copies": 1')),
        "was changed after it was written",
    ),
    "an edited index": (
        "index.npy",
        lambda f: f.write_bytes(f.read_bytes()[:-1] + b"x"),
        "corrupt",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_found_fast(config, tmp_path, damage):
    out = tmp_path / "out"
    prepare_at(config, str(out), ALONE)
    assert verify(Place(str(out))).shards == 4
    name, do, message = DAMAGE[damage]
    do(out / name)
    with pytest.raises(UserError, match=message):
        verify(Place(str(out)))


def test_a_flipped_bit_is_found_by_the_checksums_and_by_reading(config, tmp_path):
    out = tmp_path / "out"
    store = prepare_at(config, str(out), ALONE)
    file = out / "shards/00001/tokens/c/0"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    verify(Place(str(out)))
    with pytest.raises(UserError, match="is corrupt"):
        verify(Place(str(out)), full=True)
    with pytest.raises(UserError, match=r"shards/00001 cannot be read .*latte data verify"):
        [stream.read(np.arange(0, len(stream), 50), 50) for stream in store.split("train")]


def test_a_disk_that_fills_leaves_no_store(config, corpus, tmp_path):
    for i in range(4, 8):
        write(corpus / f"train/{i}.jsonl.zst", books(500, first=i * 1000))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is refused")
    try:
        with pytest.raises(UserError, match=r"No space left on device.*--out"):
            prepare_at(config, str(disk / "out"), ALONE)
        with pytest.raises(UserError, match=r"manifest\.json is missing"):
            TokenStore.open(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        prepare_at(config, str(disk / "out"), ALONE)
        prepare_at(config, str(tmp_path / "other"), ALONE)
        assert digest(disk / "out") == digest(tmp_path / "other")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


COMMAND = [sys.executable, "-m", "latte", "data", "prepare", "--tokenizer", "sentencepiece"]
COMMAND += ["--data.tokenizer_vocab", "300", "--json"]


def start(corpus: Path, out: Path, *more: str, **environment: str) -> subprocess.Popen:
    arguments = [*COMMAND, "--corpus", str(corpus), "--out", str(out), *more]
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RAY_DEDUP_LOGS": "0"} | environment,
    )


def finish(process: subprocess.Popen, seconds: float = 300) -> dict:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_killed_at_20_random_moments_the_store_is_the_same(tmp_path):
    make_corpus(tmp_path / "corpus", files=12, rows=3000)
    begun = time.monotonic()
    finish(start(tmp_path / "corpus", tmp_path / "whole", "--workers", "1"))
    seconds = time.monotonic() - begun
    dice = random.Random(0)
    kills = 0
    while kills < 20:
        process = start(tmp_path / "corpus", tmp_path / "out", "--workers", "1")
        time.sleep(dice.uniform(0, seconds))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
        if (tmp_path / "out/manifest.json").exists():  # whole: begin anew
            assert digest(tmp_path / "out") == digest(tmp_path / "whole")
            shutil.rmtree(tmp_path / "out")
    finish(start(tmp_path / "corpus", tmp_path / "out", "--workers", "1"))
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.slow
def test_one_two_and_eight_workers_make_the_same_store(tmp_path):
    make_corpus(tmp_path / "corpus", files=12, rows=500)
    made = []
    for workers in ("1", "2", "8"):
        out = tmp_path / workers
        finish(start(tmp_path / "corpus", out, "--workers", workers))
        made.append(digest(out))
    assert made[0] == made[1] == made[2]


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""What the processes of the test's own cluster know each other by."""


def ray(*arguments: str) -> subprocess.Popen:
    """A node of a Ray cluster, in a process group of its own."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        [*command, *arguments], start_new_session=True, env=os.environ | TOKEN, **quiet
    )


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_makes_the_same_store(tmp_path):
    """A head and two nodes as processes; one node is killed while it works."""
    make_corpus(tmp_path / "corpus", files=24, rows=4000)
    finish(start(tmp_path / "corpus", tmp_path / "whole", "--workers", "1"))
    port = str(random.Random().randint(20_000, 30_000))
    address = f"127.0.0.1:{port}"
    nodes = [ray("--head", "--port", port, "--include-dashboard", "false")]
    time.sleep(8)
    nodes += [ray("--address", address) for _ in range(2)]
    time.sleep(8)
    try:
        process = start(tmp_path / "corpus", tmp_path / "out", "--ray", address, **TOKEN)
        shards = tmp_path / "out/shards"
        until = time.monotonic() + 120
        while len(list(shards.glob("*"))) < 6 and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        node = psutil.Process(nodes[1].pid)
        for part in [node, *node.children(recursive=True)]:
            part.kill()
        finish(process)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGTERM)
                node.wait(60)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """A file of eight times the text is prepared with about the same memory."""
    program = (
        "import re, sys; from latte.cli import main; status = main(sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]);"
        "sys.exit(status)"
    )
    peaks = []
    dice = random.Random(0)
    for rows in (20_000, 160_000):
        texts = (dice.randbytes(700).hex() for _ in range(rows))
        write(tmp_path / f"{rows}.jsonl.zst", ((text, "A") for text in texts))
        arguments = ["data", "prepare", "--corpus", str(tmp_path / f"{rows}.jsonl.zst")]
        arguments += ["--out", str(tmp_path / f"{rows}"), "--tokenizer", "bytes", "--workers", "1"]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert max(peaks) < 600, peaks
    assert peaks[1] < peaks[0] + 50, peaks
