"""Which documents are held out."""

import hashlib
from typing import NamedTuple

from latte.data.documents import Document
from latte.errors import UserError


class Split(NamedTuple):
    """The documents to train on, and those to evaluate on."""

    train: list[Document]
    heldout: list[Document]


def hold_out(documents: list[Document], share: float) -> Split:
    """Holds out about `share` of the bytes: whole documents, or the end of a lone one.

    Documents are taken in the order of the hash of their names until the share is reached, so the
    choice depends on names and sizes alone. A document that by itself is larger than the share is
    passed over (a folder with one large file would lose it), unless all are: then the smallest is
    taken.

    Args:
      share: of the bytes, in [0, 0.5].

    Raises:
      UserError: the share is out of range.
    """
    if not 0 <= share <= 0.5:
        raise UserError(f"--data.heldout is {share}: give a share between 0 and 0.5")
    if len(documents) == 1:
        return _cut(documents[0], share)
    wanted = share * sum(document.size for document in documents)
    taken: set[str] = set()
    size = 0
    for document in sorted(documents, key=_rank):
        if size < wanted and document.size <= wanted:
            taken.add(document.source.name)
            size += document.size
    if wanted and not taken:
        taken = {min(documents, key=lambda document: (document.size, _rank(document))).source.name}
    return Split(
        [document for document in documents if document.source.name not in taken],
        [document for document in documents if document.source.name in taken],
    )


def _rank(document: Document) -> bytes:
    return hashlib.sha256(document.source.name.encode(errors="surrogateescape")).digest()


def _cut(document: Document, share: float) -> Split:
    """The start of a document to train on and its end to hold out, cut between two characters."""
    text = document.read().encode()
    # As nanoGPT cuts: the first int(n · (1 − share)) bytes are trained on.
    cut = int(len(text) * (1 - share))
    while cut < len(text) and text[cut] & 0b1100_0000 == 0b1000_0000:  # inside a character
        cut -= 1
    parts = document._replace(stop=cut), document._replace(start=cut)
    return Split(*([part] if part.size else [] for part in parts))
