"""Rows are dealt out by weight: exactly, evenly, and as a function of the row alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.config import DataConfig
from latte.data.corpus import find_corpus
from latte.data.engine import Engine
from latte.data.loader import Loader
from latte.data.mixture import Mixture
from latte.data.prepare import prepare_at
from latte.data.store import TokenStore
from latte.errors import UserError
from latte.values import parse_mixture
from tests.data.recordfiles import books, write

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def mixture_of(weights: list[float]) -> Mixture:
    names = [str(i) for i in range(len(weights))]
    return Mixture.of(names, [(0, dict(zip(names, weights, strict=True)))])


def dealt(mixture: Mixture, rows: range) -> np.ndarray:
    return np.asarray([mixture.locate(row).subset for row in rows])


@given(WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_every_row_is_the_next_of_its_subset(weights):
    mixture = mixture_of(weights)
    counts = [0] * len(weights)
    for row in range(400):
        assert mixture.counts(row) == tuple(counts)
        subset, nth = mixture.locate(row)
        assert nth == counts[subset]
        counts[subset] += 1


@given(WEIGHTS, st.integers(0, 10**12))
@settings(max_examples=200, deadline=None)
def test_no_subset_strays_from_its_weight(weights, row):
    """After any number of rows, and so to far less than 0.1% over a million."""
    shares = np.asarray(weights) / sum(weights)
    counts = np.asarray(mixture_of(weights).counts(row), float)
    assert counts.sum() == row
    assert np.all(np.abs(counts - row * shares) < 1.0 + row * 1e-11)


def slimpajama(tmp_path) -> dict[str, float]:
    return dict(find_corpus(DataConfig(corpus="slimpajama", path=str(tmp_path))).weights)


def test_the_published_weights_hold_in_a_million_rows_and_in_any_hundred(tmp_path):
    weights = slimpajama(tmp_path)
    names = sorted(weights)
    mixture = Mixture.of(names, [(0, weights)])
    counts = np.asarray(mixture.counts(1_000_000)) / 1_000_000
    shares = np.asarray([weights[name] for name in names])
    np.testing.assert_allclose(counts, shares, rtol=1e-3)
    rows = dealt(mixture, range(20_000))
    for i, share in enumerate(shares):
        before = np.concatenate([[0], np.cumsum(rows == i)])
        in_hundred = before[100:] - before[:-100]
        assert np.abs(in_hundred - np.round(100 * share)).max() <= 1


def test_weights_change_at_a_step():
    names = ["A", "B"]
    stages = [(0, {"A": 1.0}), (100, {"A": 0.25, "B": 0.75}), (300, {"B": 1.0})]
    mixture = Mixture.of(names, stages)
    rows = dealt(mixture, range(400))
    assert set(rows[:100]) == {0}
    assert np.mean(rows[100:300] == 1) == pytest.approx(0.75, abs=0.01)
    assert set(rows[300:]) == {1}
    assert mixture.counts(400)[0] == 150
    nth = [mixture.locate(row).nth for row in range(400)]
    for subset in (0, 1):
        mine = [n for n, of in zip(nth, rows, strict=True) if of == subset]
        assert mine == list(range(len(mine)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A", "'A' must be SUBSET=WEIGHT"),
        ("A=-1", "'A=-1' must be SUBSET=WEIGHT, a weight of at least 0"),
        ("A=0", "the weights from step 0 on must have one above 0"),
        ("@5, A=1", "it must say the weights of step 0 first"),
        ("A=1, @x, A=1", "'@x' must be @STEP"),
        ("A=1, @9, A=1, @9, A=2", "'@9' must be @STEP, later than the one before it"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        parse_mixture(text)


def test_names_may_have_spaces():
    assert parse_mixture("Wikipedia (en)=2, Pile-CC = 1,@7,Pile-CC=1") == [
        (0, {"Wikipedia (en)": 2.0, "Pile-CC": 1.0}),
        (7, {"Pile-CC": 1.0}),
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    """Three subsets of different sizes, in four shards."""
    folder = tmp_path_factory.mktemp("mixed")
    for i in range(4):
        names = ("A", "A", "A", "B", "B", "C")
        write(folder / f"corpus/{i}.jsonl.zst", books(150, first=i * 150, names=names))
    config = DataConfig(path=str(folder / "corpus"), tokenizer="bytes", heldout=0.1)
    return prepare_at(config, str(folder / "out"), Engine(workers=1))


def test_by_default_every_subset_counts_by_its_size(store):
    loader = Loader(store, "train", 0, 8, 64)
    rows = sum(loader.packed.per_epoch)
    counts = loader.mixture.counts(rows)
    np.testing.assert_allclose(counts, loader.packed.per_epoch, atol=1)
    assert loader.epochs(rows // 8)["A"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("packing", ["cut", "fit"])
def test_no_row_of_a_subset_repeats_within_an_epoch(store, packing):
    data = DataConfig(mixture="A=0.2, B=0.7, C=0.1", packing=packing)
    loader = Loader(store, "train", 5, 4, 64, data=data)
    seen: dict[tuple[int, int], list] = {}
    for row in range(3 * sum(loader.packed.per_epoch)):
        place = loader.place(*divmod(row, 4))
        epoch = place.nth // loader.packed.per_epoch[place.subset]
        seen.setdefault((place.subset, epoch), []).append(loader.packed.pieces(place))
    assert max(epoch for _, epoch in seen) > 2
    for (subset, _), pieces in seen.items():
        starts = [piece[0].start for piece in pieces]
        assert len(set(starts)) == len(starts) <= loader.packed.per_epoch[subset]


@pytest.mark.parametrize("packing", ["cut", "fit"])
def test_hosts_that_share_a_batch_read_its_rows(store, packing):
    data = DataConfig(mixture="A=3, B=1, @3, C=1", packing=packing)
    whole = Loader(store, "train", 9, 8, 64, data=data)
    for hosts in (2, 4):
        parts = [
            Loader(store, "train", 9, 8, 64, np.arange(8)[host::hosts], data)
            for host in range(hosts)
        ]
        for step in (0, 2, 3, 40):
            batch = whole.batch_at(step)
            for host, part in enumerate(parts):
                for a, b in zip(batch, part.batch_at(step), strict=True):
                    np.testing.assert_array_equal(a[host::hosts], b)


def test_weights_by_documents_are_those_of_tokens_by_their_length(store):
    by = {}
    for unit in ("tokens", "documents"):
        data = DataConfig(mixture="A=1, B=1", mixture_by=unit)
        by[unit] = np.asarray(Loader(store, "train", 0, 1, 64, data=data).mixture.counts(1000))
    counts = store.manifest.subsets["train"]
    mean = [counts[name].tokens / counts[name].documents for name in "AB"]
    assert by["tokens"].tolist() == [500, 500, 0]
    assert by["documents"][0] / by["documents"][1] == pytest.approx(mean[0] / mean[1], rel=0.01)


def test_a_mixture_of_what_is_not_there_is_refused(store):
    for text, words in (
        ("RedPajama=1", "names 'RedPajama', which .* has not; there are A, B, C"),
        ("A=1, @50, D=1", "names 'D'"),
    ):
        with pytest.raises(UserError, match=words):
            Loader(store, "train", 0, 1, 64, data=DataConfig(mixture=text))
    tokens = min(len(stream) for stream in store.split("train"))
    with pytest.raises(UserError, match=f"has {tokens} tokens, fewer than a row of {tokens + 1}"):
        Loader(store, "train", 0, 1, tokens + 1, data=DataConfig(mixture="C=1"))
