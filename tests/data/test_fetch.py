"""Files from web servers and object stores: whole, checked, and as they are on a disk."""

import hashlib
import json

import numpy as np
import pytest

from latte.config import DataConfig
from latte.data.corpus import CORPORA, find_corpus
from latte.data.engine import Engine
from latte.data.fetch import list_files, open_bytes
from latte.data.loader import Loader
from latte.data.prepare import prepare, prepare_at
from latte.data.verify import verify
from latte.errors import UserError
from tests.data.recordfiles import books, pack
from tests.data.servers import Handler, object_store, serve, web_server

CONTENT = bytes(range(256)) * 4000


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_is_made_again_from_there(ranges):
    web = web_server({"/a": CONTENT}, cut=300_000 if ranges else 0, ranges=ranges)
    with serve(web) as url, open_bytes(f"{url}/a") as file:
        assert file.read() == CONTENT
    if ranges:
        assert web.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_server_that_is_gone_is_named():
    with serve(web_server({})) as url, pytest.raises(UserError, match=r"/a cannot be read .*404"):
        open_bytes(f"{url}/a")
    with pytest.raises(UserError, match=rf"{url}/a cannot be reached"):
        open_bytes(f"{url}/a")


def test_a_file_that_changes_while_it_is_read_is_refused():
    files = {"/a": CONTENT}
    with serve(web_server(files, cut=100_000)) as url, open_bytes(f"{url}/a") as file:
        file.read(1000)
        files["/a"] = CONTENT[::-1]
        with pytest.raises(UserError, match="changed while it was being read"):
            file.read()


def test_a_lone_file_of_the_web_is_a_corpus(tmp_path):
    with serve(web_server({"/deep/a.jsonl.zst": pack("a.jsonl.zst", books(50))})) as url:
        config = DataConfig(path=f"{url}/deep/a.jsonl.zst", tokenizer="bytes", cache=str(tmp_path))
        store = prepare(config)
    assert sum(count.documents for count in store.manifest.splits.values()) == 50
    assert store.subsets == ["A", "B", "C"]


def test_a_file_that_is_not_what_was_published_is_refused(tmp_path):
    content = pack("a.jsonl.zst", books(50))
    names = [f"/pile/train/{i:02}.jsonl.zst" for i in range(30)]
    files = dict.fromkeys([*names, "/pile/val.jsonl.zst", "/pile/test.jsonl.zst"], content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  ./{name[6:]}" for name in files]
    sums[3] = f"{'0' * 64}  ./train/03.jsonl.zst"
    files["/pile/SHA256SUMS.txt"] = "\n".join(sums).encode()
    with serve(web_server(files)) as url:
        corpus = find_corpus(DataConfig(corpus="pile", path=f"{url}/pile"))
        assert sum(source.sha256 == sums[0][:64] for source in corpus.sources) == 31
        config = DataConfig(corpus="pile", path=f"{url}/pile", tokenizer="bytes", skip_bad=2000)
        with pytest.raises(UserError, match=r"train/03\.jsonl\.zst is not what was published"):
            prepare_at(config, str(tmp_path / "out"), Engine(workers=1))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_data_set_of_the_hub_is_listed_with_its_checksums(monkeypatch):
    """Of the hub's interface what is asked: the files of a folder of a revision."""
    # Whatever the environment said when another test's module was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    content = pack("a.jsonl.zst", books(50))
    digest = hashlib.sha256(content).hexdigest()
    large = {"oid": digest, "size": len(content), "pointerSize": 130}
    tree = [
        {"type": "directory", "path": "deep/train", "oid": "0"},
        {"type": "file", "path": "deep/train/a.jsonl.zst", "size": 1, "oid": "1", "lfs": large},
        {"type": "file", "path": "deep/README.md", "size": 1, "oid": "2"},
    ]

    class Hub(Handler):
        def do_GET(self) -> None:
            path, _, _ = self.path.partition("?")
            if path == "/api/datasets/some/text/tree/main/deep":
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            if path == "/datasets/some/text/resolve/main/deep/train/a.jsonl.zst":
                return self.send_file(content)
            return self.answer(404)

    with serve(Hub) as url:
        place = f"{url}/datasets/some/text/resolve/main/deep"
        assert list_files(place) == {"train/a.jsonl.zst": digest, "README.md": ""}
        source = find_corpus(DataConfig(path=f"{place}/train/a.jsonl.zst")).sources[0]
        with open_bytes(str(source.path)) as file:
            assert file.read() == content


@pytest.fixture
def objects() -> dict[str, bytes]:
    """The objects of a server of S3's kind, which is up during the test."""
    return {}


@pytest.fixture
def s3(objects, monkeypatch):
    with serve(object_store(objects)) as url:
        for name, value in (
            ("AWS_ENDPOINT_URL", url),
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "y"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        yield url


def test_a_store_in_a_bucket_is_the_one_on_a_disk(tmp_path, s3, objects):
    for name in ("train/a.jsonl.zst", "train/b.jsonl.gz", "deep/c.parquet", "val.jsonl"):
        rows = books(60, first=len(objects) * 60)
        objects[f"/bucket/corpus/{name}"] = pack(name, rows)
        file = tmp_path / "corpus" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pack(name, rows))
    here = DataConfig(path=str(tmp_path / "corpus"), tokenizer="bytes")
    there = DataConfig(path="s3://bucket/corpus", tokenizer="bytes")
    assert sorted(list_files("s3://bucket/corpus")) == sorted(list_files(str(tmp_path / "corpus")))
    one = prepare_at(here, str(tmp_path / "out"), Engine(workers=1))
    other = prepare_at(there, "s3://bucket/out", Engine(workers=1))
    different = {"manifest.json", "plan.json"}  # they say where the corpus was
    names = sorted(set(one.place.names()) - different)
    assert sorted(set(other.place.names()) - different) == names
    for name in names:
        assert objects[f"/bucket/out/{name}"] == (tmp_path / "out" / name).read_bytes()
    loaders = [Loader(store, "train", 3, 4, 50) for store in (one, other)]
    for step in range(20):
        for a, b in zip(*(loader.batch_at(step) for loader in loaders), strict=True):
            np.testing.assert_array_equal(a, b)
    del objects["/bucket/out/shards/00002/tokens/c/0"]
    with pytest.raises(UserError, match=r"s3://bucket/out/shards/00002.* is missing"):
        verify(other.place)


def test_every_corpus_of_the_repository_has_its_layout(tmp_path):
    (tmp_path / "validation/chunk1").mkdir(parents=True)
    (tmp_path / "validation/chunk1/example_holdout_0.jsonl.zst").touch()
    slim = find_corpus(DataConfig(corpus="slimpajama", path=str(tmp_path)))
    train = [source.name for source in slim.sources if not source.heldout]
    assert len(train) == 59_166
    assert "train/chunk10/example_train_5911.jsonl.zst" in train
    assert "train/chunk1/example_train_5912.jsonl.zst" not in train
    held = [source.name for source in slim.sources if source.heldout]
    assert held == ["validation/chunk1/example_holdout_0.jsonl.zst"]
    assert len(slim.subsets) == 7
    assert sum(slim.weights.values()) == pytest.approx(1)
    pile = find_corpus(DataConfig(corpus="pile", path=str(tmp_path)))
    assert [source.name for source in pile.sources] == [
        "test.jsonl.zst",
        *(f"train/{i:02}.jsonl.zst" for i in range(30)),
        "val.jsonl.zst",
    ]
    assert [source.heldout for source in pile.sources] == [True, *[False] * 30, True]
    assert len(pile.subsets) == 22
    assert {"pile_uncopyrighted", "openwebtext"} <= {file.stem for file in CORPORA.glob("*.py")}
