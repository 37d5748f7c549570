"""Rows are a pure function of seed and step, and lose nothing."""

import hashlib
import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.config import DataConfig
from latte.data.heldout import heldout_rows
from latte.data.loader import Loader
from latte.data.mixture import Place
from latte.data.prepare import prepare
from latte.errors import UserError


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def ring(store, split):
    [stream] = store.split(split)
    return stream.read(np.asarray([0]), len(stream))[0]


def start_of(loader, row):
    """Where a row of the run begins in the stream of the only subset."""
    return loader.packed.start(Place(0, row))


def documents_of(tokens, separator):
    """The definition of segment ids, a token at a time."""
    ids, current = [], 0
    for token in tokens:
        current += token == separator
        ids.append(current)
    return ids


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 200), st.integers(0, 300))
@settings(max_examples=20, deadline=None)
def test_reading_on_from_any_step_gives_the_same_batches(store, seed, B, T, step):
    loader = Loader(store, "train", seed, B, T)
    for k, batch in enumerate(itertools.islice(loader.iterate(step), 3)):
        assert_same(batch, loader.batch_at(step + k))
    assert_same(loader.batch_at(step), Loader(store, "train", seed, B, T).batch_at(step))


PROGRAM = """
import sys, hashlib
from pathlib import Path
from latte.data.loader import Loader
from latte.data.store import TokenStore
loader = Loader(TokenStore.open(Path(sys.argv[1])), "train", 7, 3, 50)
iterator = loader.iterate(20)
digest = hashlib.sha256()
for _ in range(40):
    for array in next(iterator):
        digest.update(array.tobytes())
print(digest.hexdigest())
"""


def test_another_process_reads_the_same(store):
    command = [sys.executable, "-c", PROGRAM, str(store.place)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    digest = hashlib.sha256()
    loader = Loader(store, "train", 7, 3, 50)
    for step in range(20, 60):
        for array in loader.batch_at(step):
            digest.update(array.tobytes())
    assert printed.stdout.strip() == digest.hexdigest()


def test_rows_are_what_they_were(tmp_path):
    """A run that goes on must read what its first part would have: this order is frozen."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}").write_text(chr(ord("a") + i) * 20)
    config = DataConfig(path=str(folder), tokenizer="bytes", heldout=0.1, cache=str(tmp_path))
    loader = Loader(prepare(config), "train", 1, 4, 12)
    decode = loader.store.tokenizer.decode
    rows = [decode(row) for row in loader.batch_at(5).tokens]
    assert rows == ["aabbbbbbbbb", "ddddddddeee", "eeeeeffffff", "aaaaaaaaaaaa"]


@pytest.mark.parametrize("T", [1, 7, 64])
@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_has_every_token_once_but_for_less_than_a_row(store, T, epoch):
    loader = Loader(store, "train", 5, 1, T)
    stream = ring(store, "train")
    rows = loader.packed.per_epoch[0]
    assert rows == len(stream) // T
    starts = [start_of(loader, epoch * rows + row) for row in range(rows)]
    covered = np.concatenate([(start + np.arange(T)) % len(stream) for start in starts])
    assert len(set(covered.tolist())) == len(covered) > len(stream) - T
    if T == 7:
        for row in range(rows):
            batch = loader.batch_at(epoch * rows + row)
            positions = (starts[row] + np.arange(T + 1)) % len(stream)
            np.testing.assert_array_equal(batch.tokens[0], stream[positions[:-1]])
            np.testing.assert_array_equal(batch.targets[0], stream[positions[1:]])


def test_epochs_and_seeds_differ_in_cut_and_order(store):
    def starts(seed, epoch):
        loader = Loader(store, "train", seed, 1, 16)
        first = epoch * loader.packed.per_epoch[0]
        return [start_of(loader, first + row) for row in range(loader.packed.per_epoch[0])]

    orders = [starts(0, 0), starts(0, 1), starts(1, 0), starts(1, 1)]
    for one, other in itertools.combinations(orders, 2):
        assert set(one) != set(other)
        assert [s - one[0] for s in one] != [s - other[0] for s in other]
    steps = np.diff(orders[0])
    assert np.mean(np.abs(steps) > 16) > 0.9


def test_consecutive_rows_come_from_all_over_the_stream(store):
    loader = Loader(store, "train", 3, 1, 1)
    starts = np.asarray([start_of(loader, row) for row in range(loader.packed.per_epoch[0])])
    hundreds = starts[: len(starts) // 100 * 100].reshape(-1, 100).mean(axis=1) / len(starts)
    assert np.all(np.abs(hundreds - 0.5) < 0.2)


def test_batches_have_the_types_and_segments_of_their_definition(store):
    loader = Loader(store, "train", 0, 6, 90)
    separator = store.tokenizer.separator
    for step in range(20):
        batch = loader.batch_at(step)
        for array in batch:
            assert array.shape == (6, 90)
            assert array.flags.c_contiguous
            assert array.dtype == (np.float32 if array is batch.weights else np.int32)
        np.testing.assert_array_equal(batch.targets[:, :-1], batch.tokens[:, 1:])
        for row in range(6):
            ids = documents_of(batch.tokens[row].tolist(), separator)
            assert batch.segment_ids[row].tolist() == ids
        assert batch.weights.min() == 1


def test_a_document_never_goes_on_past_its_end(store):
    """Where the segment changes, a document of the store begins, and nowhere else."""
    [stream] = store.split("train")
    starts = set(stream.offsets[:-1].tolist())
    loader = Loader(store, "train", 2, 1, 70)
    for step in range(40):
        first = start_of(loader, step)
        ids = loader.batch_at(step).segment_ids[0]
        changes = {(first + int(i) + 1) % len(stream) for i in np.flatnonzero(np.diff(ids))}
        span = {(first + i) % len(stream) for i in range(1, 70)}
        assert changes == span & starts


def test_a_row_may_be_the_whole_ring_but_no_more(store):
    tokens = len(store.split("train")[0])
    batch = Loader(store, "train", 0, 2, tokens).batch_at(0)
    assert sorted(batch.tokens[0].tolist()) == sorted(ring(store, "train").tolist())
    with pytest.raises(UserError, match=r"lower --train\.sequence_length or give more text"):
        Loader(store, "train", 0, 2, tokens + 1)


def joined(rows):
    """Real tokens and targets of held-out rows, in order."""
    kept = [(b.tokens[b.weights > 0], b.targets[b.weights > 0]) for b in rows]
    return tuple(np.concatenate(part) for part in zip(*kept, strict=True))


@pytest.mark.parametrize(("T", "B"), [(1, 1), (13, 4), (64, 3), (5000, 2)])
def test_held_out_documents_are_read_once_in_order(store, T, B):
    [rows] = heldout_rows(store, T, B)
    stream = ring(store, "heldout")
    tokens, targets = joined(rows)
    np.testing.assert_array_equal(tokens, stream)
    np.testing.assert_array_equal(targets, np.append(stream[1:], store.tokenizer.separator))
    assert rows.targets == len(stream)
    assert rows.bytes == store.manifest.splits["heldout"].bytes
    for batch in rows:
        assert batch.tokens.shape == (B, T)
        padding = batch.weights == 0
        assert np.all(batch.tokens[padding] == store.tokenizer.separator)
        for row in range(B):
            ids = batch.segment_ids[row]
            assert not set(ids[padding[row]]) & set(ids[~padding[row]])


@given(st.integers(1, 3000), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_a_limit_reads_whole_documents_and_counts_their_bytes(store, limit, T):
    [rows] = heldout_rows(store, T, 2, limit)
    tokens, targets = joined(rows)
    assert rows.targets == len(tokens) <= limit
    offsets = store.split("heldout")[0].offsets
    if limit >= offsets[1]:
        assert rows.targets in offsets
        assert rows.targets == max(o for o in offsets if o <= limit)
    else:
        assert rows.targets == limit
    assert rows.bytes == len(store.tokenizer.decode_bytes(targets))


def test_nothing_held_out_is_said(corpus, tmp_path):
    store = prepare(
        DataConfig(path=str(corpus), tokenizer="bytes", heldout=0.0, cache=str(tmp_path))
    )
    assert store.split("heldout") == []
    with pytest.raises(UserError, match=r"raise --data\.heldout"):
        heldout_rows(store, 10, 1)


def test_reading_takes_little_time(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(np.random.default_rng(0).integers(97, 122, 4_000_000, np.uint8).tobytes())
    store = prepare(DataConfig(path=str(file), tokenizer="bytes", cache=str(tmp_path)))
    loader = Loader(store, "train", 0, 32, 1024)
    loader.batch_at(0)
    start = time.process_time()
    for step in range(100):
        loader.batch_at(step)
    rate = 100 * 32 * 1024 / (time.process_time() - start)
    assert rate > 5e6, f"{rate / 1e6:.1f}M tokens/s"
