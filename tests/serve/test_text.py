"""Text that is sent on: whole characters, and nothing of a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from latte.serve.text import TextStream

LETTERS = st.text("abé😀", max_size=12)


@given(LETTERS, st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=3), st.data())
def test_pieces_join_to_the_text_before_the_first_stop(text, stops, data):
    raw, stream, found, stopped = text.encode(), TextStream(stops), "", False
    while raw and not stopped:
        size = data.draw(st.integers(1, len(raw)))
        piece = stream.push(raw[:size])
        found, stopped, raw = found + piece.text, piece.stopped, raw[size:]
        assert text.startswith(found)
    if not stopped:
        piece = stream.push(b"", final=True)
        found, stopped = found + piece.text, piece.stopped
    ends = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if stopped:
        # A longer stop may begin before a shorter one that ends first.
        assert found in {text[:end] for end in ends}
    else:
        assert found == text


def test_bytes_that_are_no_text_are_marked():
    stream = TextStream([])
    assert stream.push(b"a\xc3").text == "a"
    assert stream.push(b"b").text == "\ufffdb"
    assert stream.push(b"\xe2\x82").text == ""
    assert stream.push(b"", final=True).text == "\ufffd"
