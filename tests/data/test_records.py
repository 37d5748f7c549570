"""Files of records: every format gives the same documents, and what is bad is named by its line."""

import json

import pytest

from latte.data.records import LONGEST, Bad, Record, read_records
from latte.errors import UserError
from tests.data.recordfiles import books, line, pack, write, zst

FORMATS = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_documents(tmp_path, name):
    rows = books(600)
    file = write(tmp_path / name, rows)
    seen = []
    found = list(read_records(str(file), seen.append))
    assert found == [Record(i, *row) for i, row in enumerate(rows, 1)]
    assert b"".join(seen) == file.read_bytes()


@pytest.mark.parametrize("key", ["redpajama_set_name", "pile_set_name"])
def test_the_set_name_may_be_in_an_object_or_in_a_string(tmp_path, key):
    meta = {key: "RedPajamaC4", "other": 1}
    records = [{"text": "a", "meta": meta}, {"text": "b", "meta": json.dumps(meta)}, {"text": "c"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    names = [record.subset for record in read_records(str(file))]  # pyright: ignore
    assert names == ["RedPajamaC4", "RedPajamaC4", "text"]


GOOD = line("good", "A")
BAD = {
    "not JSON": (b"{nonsense}\n", "not JSON"),
    "half a line": (b'{"text": "ab\n', "not JSON"),
    "no object": (b'["text"]\n', "not a JSON object"),
    "missing": (b'{"meta": {}}\n', 'no "text"'),
    "null": (b'{"text": null}\n', 'no "text"'),
    "empty": (b'{"text": "", "meta": {"pile_set_name": "A"}}\n', 'an empty "text"'),
    "number": (b'{"text": 1}\n', '"text" is not a string'),
    "UTF-8": (b'{"text": "a\xff"}\n', "not UTF-8 at byte 11 of the line"),
    "surrogate": (rb'{"text": "a\ud800"}' + b"\n", "half of a surrogate pair at character 1"),
    "NUL": (rb'{"text": "ab\u0000c"}' + b"\n", "a NUL at character 2"),
    "meta": (b'{"text": "a", "meta": 3}\n', '"meta" names no set'),
    "meta text": (b'{"text": "a", "meta": "A"}\n', '"meta" names no set'),
    "set": (line("a", "Z"), "an unknown set name 'Z'"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, kind, suffix):
    bad, reason = BAD[kind]
    content = GOOD + b"\n" + bad + GOOD
    file = tmp_path / f"a{suffix}"
    file.write_bytes(zst(content, 2) if suffix.endswith(".zst") else content)
    first, found, last = read_records(str(file), known={"A", "text"})
    assert first == Record(1, "good", "A")
    assert last == Record(4, "good", "A")
    assert isinstance(found, Bad)
    assert found.line == 3
    assert found.reason.startswith(reason)


def test_a_document_of_50_mb_is_named(tmp_path):
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(zst(GOOD + line("x" * 50_000_000, "A") + GOOD))
    kinds = list(read_records(str(file)))
    assert kinds == [
        Record(1, "good", "A"),
        Bad(2, f"longer than {LONGEST >> 20} MB"),
        Record(3, "good", "A"),
    ]


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_truncated_file_is_named_where_it_breaks_off(tmp_path, name, share):
    rows = books(400)
    content = pack(name, rows)
    file = tmp_path / name
    file.write_bytes(content[: int(len(content) * share)])
    *whole, last = read_records(str(file))
    assert isinstance(last, Bad)
    assert "truncated" in last.reason
    assert whole == [Record(i, *row) for i, row in enumerate(rows, 1)][: len(whole)]


@pytest.mark.parametrize("name", FORMATS[1:])
def test_a_damaged_file_is_named(tmp_path, name):
    content = bytearray(pack(name, books(400)))
    for at in range(len(content) // 2, len(content) // 2 + 40):
        content[at] ^= 0x5A
    file = tmp_path / name
    file.write_bytes(content)
    assert any(isinstance(record, Bad) for record in read_records(str(file)))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.jsonl: No such file"):
        list(read_records(str(tmp_path / "none.jsonl")))
