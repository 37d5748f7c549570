"""The inputs of a store: which files become which shard, and which texts are held out."""

import hashlib
from typing import NamedTuple

from latte.config import DataConfig
from latte.data.corpus import Corpus, Source, find_corpus
from latte.data.documents import LeftOut, Survey, survey
from latte.data.fetch import is_url, open_bytes, size_of
from latte.data.progress import Progress, Stage
from latte.data.records import is_records
from latte.data.split import hold_out
from latte.data.task import Input, Part, texts_to_inputs
from latte.errors import UserError


class Found(NamedTuple):
    """A corpus whose files are known.

    inputs: what the shards are made of, in order.
    share: of the documents of records that is held out by their hash.
    left_out: files that are in no input.
    """

    corpus: Corpus
    inputs: tuple[Input, ...]
    share: float
    left_out: list[LeftOut]


def find_inputs(config: DataConfig, report: Progress) -> Found:
    """The corpus that `config` asks for, its texts surveyed and split.

    Raises:
      UserError: the corpus is not there, or holds no text.
    """
    corpus = find_corpus(config)
    records = [source for source in corpus.sources if is_records(source.name)]
    texts = _survey([s for s in corpus.sources if not is_records(s.name)], config, report)
    # A corpus that has files to evaluate on needs no other documents for that.
    share = 0.0 if any(source.heldout for source in records) else config.heldout
    if not records and not texts.documents:
        pairs = list(zip(corpus.sources, texts.left_out, strict=True))[:3]
        files = ", ".join(f"{source.path} ({left.reason})" for source, left in pairs)
        raise UserError(f"the corpus holds no text, only {files}: give files with text in UTF-8")
    split = hold_out(texts.documents, share)
    parts = [Part(document, False) for document in split.train]
    parts += [Part(document, True) for document in split.heldout]
    parts.sort(key=lambda part: (part.document.source.name, part.document.start))
    inputs = (*texts_to_inputs(parts), *(Input(source) for source in records))
    return Found(corpus, inputs, share, texts.left_out)


def size_of_input(item: Input) -> int:
    """The bytes of an input; 0 for one that is not on this machine."""
    if item.source is None:
        return sum(part.document.size for part in item.parts)
    return 0 if is_url(str(item.source.path)) else size_of(str(item.source.path))


def identity(item: Input, *, read: bool) -> list:
    """What tells an input from another of its name: its checksum, where it is known.

    Args:
      read: read files of this machine for it; ask for the size of others.
    """
    if item.source is None:
        return [(part.document.source.name, part.document.sha256) for part in item.parts]
    name, path = item.source.name, str(item.source.path)
    if item.source.sha256 or not read:
        return [name, item.source.sha256]
    if is_url(path):
        return [name, path, size_of(path)]
    with open_bytes(path) as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return [name, digest.hexdigest()]


def _survey(sources: list[Source], config: DataConfig, report: Progress) -> Survey:
    if not sources:
        return Survey([], [])
    stage = Stage(report, "reading", sum(size_of(str(source.path)) for source in sources))
    texts = survey(sources, skip_bad=config.skip_bad, progress=stage.advance)
    for left in texts.left_out:
        if left.bad:
            report.say(f"left out {left.name}: {left.reason}")
    return texts
