"""What a row of a step is made of: which documents of which files, and their text."""

from typing import NamedTuple

import numpy as np

from latte.data.loader import Loader
from latte.data.store import TokenStore, TokenStream


class Shown(NamedTuple):
    """A piece of a row.

    file, line: where its document came from; of a text, which is a whole file, the line is 0.
    document: its number in the shard.
    start, tokens: the piece in its document, whose separator is token 0.
    """

    subset: str
    epoch: int
    file: str
    line: int
    shard: int
    document: int
    start: int
    tokens: int
    text: str


def show_row(loader: Loader, step: int, row: int) -> list[Shown]:
    """The documents of a row of a step, in their order; steps and rows count from 0."""
    place = loader.place(step, row)
    epoch = place.nth // loader.packed.per_epoch[place.subset]
    stream = loader.streams[place.subset]
    return [
        shown
        for piece in loader.packed.pieces(place)
        for shown in _documents(loader.store, stream, epoch, piece.start, piece.length)
    ]


def _documents(
    store: TokenStore, stream: TokenStream, epoch: int, start: int, length: int
) -> list[Shown]:
    """The documents in `length` tokens from `start` of a stream, which do not pass its end."""
    shown = []
    ids = stream.read(np.asarray([start]), length)[0]
    done = 0
    while done < length:
        i = int(np.searchsorted(stream.ends, start + done, side="right"))
        in_shard = int(stream.index.stop[i] - stream.ends[i]) + start + done
        nth = _find(stream, i, in_shard)
        first = max(nth - 1, 0)
        rows = stream.documents_of(i, first, nth + 1)
        begin = int(rows[0, 0]) if nth else int(stream.index.start[i])
        end, _, line = rows[-1].tolist()
        count = min(end - in_shard, length - done)
        shard = int(stream.index.shard[i])
        file, line = _origin(store, shard, line)
        text = store.tokenizer.decode(ids[done : done + count])
        document = int(stream.index.first[i]) + nth
        shown.append(
            Shown(stream.subset, epoch, file, line, shard, document, in_shard - begin, count, text)
        )
        done += count
    return shown


def _find(stream: TokenStream, i: int, position: int) -> int:
    """The document of range i that holds a position of its shard, by halving."""
    low, high = 0, int(stream.index.documents[i]) - 1
    while low < high:
        middle = (low + high) // 2
        if stream.documents_of(i, middle, middle + 1)[0, 0] > position:
            high = middle
        else:
            low = middle + 1
    return low


def _origin(store: TokenStore, shard: int, line: int) -> tuple[str, int]:
    """The file and line that a document came from."""
    record = store.records[shard]
    if store.is_texts(shard):
        return record.sources[line - 1].name, 0
    return record.sources[0].name, line
