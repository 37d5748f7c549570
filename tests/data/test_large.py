"""A store of 600 billion tokens and 600 million documents, of which one shard is real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from latte.data.manifest import NAME, shard_name, write_manifest
from latte.data.place import Place
from latte.data.shard import ShardRecord, ShardWriter, record_files
from latte.data.tokenizer import ByteTokenizer

SHARDS = 59_166
SETS = ("ArXiv", "Book", "C4", "CommonCrawl", "Github", "StackExchange", "Wikipedia")

PROGRAM = """
import json, re, sys, time
from latte.config import DataConfig
from latte.data.loader import Loader
from latte.data.store import TokenStore
begun, started = time.perf_counter(), time.process_time()
store = TokenStore.open(sys.argv[1])
loader = Loader(store, "train", 0, 64, 4096, data=DataConfig(packing=sys.argv[2]))
batches = loader.iterate(0)
next(batches)
first = time.perf_counter() - begun
cpu = time.process_time() - started
begun = time.perf_counter()
for _ in range(200):
    next(batches)
speed = 200 * 64 * 4096 / (time.perf_counter() - begun)
memory = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"first": first, "cpu": cpu, "speed": speed, "memory": memory}))
"""


def make_store(folder: Path) -> None:
    """The store; all its shards are links to one of 10 million tokens."""
    tokenizer = ByteTokenizer()
    real = folder / "real"
    writer = ShardWriter(real, tokenizer)
    ids = np.random.default_rng(0).integers(0, 256, 1000).astype(np.int32)
    for i in range(10_200):
        writer.add("train", SETS[i % 7], ids[: 990 + i % 19], 1000, i + 1)
    ranges = writer.close()
    record = ShardRecord([], ranges, [], 0, record_files(real))
    (folder / "store/shards").mkdir(parents=True)
    for number in range(SHARDS):
        os.symlink(real, folder / "store" / shard_name(number))
    place = Place(str(folder / "store"))
    write_manifest(
        place,
        [record] * SHARDS,
        tokenizer.files(),
        corpus="sparse",
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        weights={},
        left_out={},
    )


@pytest.mark.slow
def test_a_store_of_600_billion_tokens_is_read_at_once(tmp_path):
    make_store(tmp_path)
    count = json.loads((tmp_path / "store" / NAME).read_text())["subsets"]["train"]
    assert sum(some["tokens"] for some in count.values()) > 600e9
    assert sum(some["documents"] for some in count.values()) > 600e6
    for packing in ("cut", "fit"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), packing]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(packing, done.stdout)
        seen = json.loads(done.stdout)
        # Work in CPU time, which other work of the machine does not make longer.
        assert min(seen["first"], seen["cpu"]) < 2
        assert seen["memory"] < 1e9
