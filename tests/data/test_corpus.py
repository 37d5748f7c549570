"""Finding documents, and naming what is wrong with them."""

import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latte.config import DataConfig
from latte.data.corpus import CORPORA, Source, find_corpus
from latte.data.documents import Document, survey
from latte.data.prepare import prepare
from latte.data.split import hold_out
from latte.errors import UserError


def test_stdlib_is_the_same_in_every_process_and_has_no_tests_in_it():
    sources = find_corpus(DataConfig()).sources
    names = [source.name for source in sources]
    root = Path(sysconfig.get_path("stdlib"))
    assert names == sorted(names)
    assert {"abc.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert all(source.path == root / source.name for source in sources)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    program = (
        "from latte.config import DataConfig; from latte.data.corpus import find_corpus;"
        "print(*[source.name for source in find_corpus(DataConfig()).sources])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert printed.stdout.split() == names
    assert survey(sources, skip_bad=0).documents


def test_a_folder_gives_every_file_that_is_not_hidden(make_folder):
    folder = make_folder(
        {"b.txt": b"b", "a.md": b"a", "deep/c": b"c", ".hidden": b"x", ".git/config": b"x"}
    )
    sources = find_corpus(DataConfig(path=str(folder))).sources
    assert [source.name for source in sources] == ["a.md", "b.txt", "deep/c"]


def test_a_corpus_may_be_a_python_file_anywhere(make_folder):
    folder = make_folder(
        {
            "mine.py": b"from pathlib import Path\nfrom latte.data.corpus import Source\n"
            b"def sources():\n  yield Source('b', Path('/b'))\n  yield Source('a', Path('/a'))\n",
            "none.py": b"",
            "same.py": b"from pathlib import Path\nfrom latte.data.corpus import Source\n"
            b"def sources():\n  yield Source('b', Path('/b'))\n  yield Source('b', Path('/a'))\n",
        }
    )
    assert find_corpus(DataConfig(corpus=str(folder / "mine.py"))).sources == [
        Source("a", Path("/a")),
        Source("b", Path("/b")),
    ]
    with pytest.raises(UserError, match=r"none.py defines no function sources\(\)"):
        find_corpus(DataConfig(corpus=str(folder / "none.py")))
    with pytest.raises(UserError, match="two files named 'b'"):
        find_corpus(DataConfig(corpus=str(folder / "same.py")))


def test_every_corpus_of_the_repository_loads(tmp_path):
    (tmp_path / "0000.parquet").touch()
    for file in CORPORA.glob("*.py"):
        path = "" if file.stem == "stdlib" else str(tmp_path)
        assert find_corpus(DataConfig(corpus=file.stem, path=path)).sources


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(corpus="stdlb"), "no corpus 'stdlb' .* did you mean 'stdlib'?"),
        (DataConfig(path="/no/such/folder"), "/no/such/folder is neither a file nor a folder"),
    ],
)
def test_a_corpus_that_does_not_exist_is_named(config, message):
    with pytest.raises(UserError, match=message):
        find_corpus(config)


def test_an_empty_folder_and_a_folder_of_empty_files_are_refused(tmp_path, make_folder):
    with pytest.raises(UserError, match="holds no files"):
        find_corpus(DataConfig(path=str(tmp_path)))
    folder = make_folder({"a.txt": b"", "b.txt": b""})
    config = DataConfig(path=str(folder), skip_bad=9, cache=str(tmp_path / "cache"))
    with pytest.raises(
        UserError, match=r"holds no text, only .*/a.txt \(empty\), .*/b.txt \(empty\)"
    ):
        prepare(config)


def test_a_file_that_cannot_be_read_is_named(make_folder):
    folder = make_folder({"a.txt": b"a"})
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    with pytest.raises(UserError, match=r"cannot read .*/gone.txt: No such file"):
        survey(find_corpus(DataConfig(path=str(folder))).sources, skip_bad=9)


def test_invalid_utf8_is_named_and_left_out_only_if_asked(make_folder):
    folder = make_folder(
        {"good.txt": "é".encode(), "bad.txt": b"abc\xff\n", "cut.txt": b"\xe2\x96"}
    )
    sources = find_corpus(DataConfig(path=str(folder))).sources
    with pytest.raises(UserError, match=r"bad.txt is not UTF-8 at byte 3: .*--data.skip_bad N"):
        survey(sources, skip_bad=0)
    found = survey(sources, skip_bad=9)
    assert [document.source.name for document in found.documents] == ["good.txt"]
    assert [tuple(left) for left in found.left_out] == [
        ("bad.txt", "not UTF-8 at byte 3", True),
        ("cut.txt", "not UTF-8 at byte 0", True),
    ]


def test_copies_are_left_out(make_folder):
    folder = make_folder({"a": b"same", "b": b"same", "c": b"other"})
    found = survey(find_corpus(DataConfig(path=str(folder))).sources, skip_bad=0)
    assert [document.source.name for document in found.documents] == ["a", "c"]
    assert found.left_out[0].reason == "a copy of a"


def test_a_file_that_changes_after_the_survey_is_refused(make_folder):
    folder = make_folder({"a": b"one"})
    (document,) = survey(find_corpus(DataConfig(path=str(folder))).sources, skip_bad=0).documents
    (folder / "a").write_bytes(b"two")
    with pytest.raises(UserError, match="changed while it was being prepared"):
        document.read()


def documents(sizes: list[int]) -> list[Document]:
    return [
        Document(Source(f"{i}.txt", Path("/none")), f"{i}", 0, size, size)
        for i, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=50), st.floats(0.01, 0.5), st.randoms())
def test_held_out_documents_are_apart_and_do_not_depend_on_the_order(sizes, share, chance):
    every = documents(sizes)
    split = hold_out(every, share)
    assert sorted(split.train + split.heldout) == sorted(every)
    assert split.train
    assert split.heldout
    assert not set(split.train) & set(split.heldout)
    shuffled = random.Random(chance.random()).sample(every, len(every))
    again = hold_out(shuffled, share)
    assert set(again.heldout) == set(split.heldout)


def test_the_held_out_share_is_reached_and_hardly_passed():
    every = documents([50 + i % 100 for i in range(1000)])
    total = sum(document.size for document in every)
    held = sum(document.size for document in hold_out(every, 0.05).heldout)
    assert 0.05 <= held / total < 0.053


def test_one_large_document_is_never_held_out():
    every = documents([10**6] + [100] * 500)
    assert every[0] in hold_out(every, 0.02).train


def test_no_share_holds_nothing_out_and_most_of_the_text_cannot_be():
    every = documents([1, 2, 3])
    assert hold_out(every, 0.0).train == every
    with pytest.raises(UserError, match=r"--data.heldout is 0\.9"):
        hold_out(every, 0.9)


def test_the_end_of_a_lone_document_is_held_out_between_characters(make_folder):
    text = "é😀a" * 100
    folder = make_folder({"a": text.encode()})
    lone = survey(find_corpus(DataConfig(path=str(folder))).sources, skip_bad=0).documents
    for share in (0.05, 0.1, 0.101, 0.102, 0.103, 0.5):
        split = hold_out(lone, share)
        train, heldout = split.train[0].read(), split.heldout[0].read()
        assert train + heldout == text
        assert abs(split.heldout[0].size / len(text.encode()) - share) < 4 / len(text.encode())
    assert hold_out(lone, 0.0) == (lone, [])
