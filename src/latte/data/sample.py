"""The texts that a tokenizer is trained on: a sample of what is trained on, by weight."""

from collections import Counter
from collections.abc import Iterator, Mapping

from latte.data.inputs import Found
from latte.data.progress import Progress, Stage
from latte.data.records import Bad, read_records
from latte.data.task import Input, hash_of, is_held_out
from latte.data.tokenizer import SAMPLE

_FILES = 64
"""Files of records among which a sample is spread, at least, where there are so many."""


def training_texts(
    found: Found, weights: Mapping[str, float], report: Progress
) -> tuple[Iterator[str], int]:
    """Texts that are not held out, and about how many characters they have.

    Of texts these are all. Of files of records it is a sample: files from all over the corpus, the
    start of each, until every subset has its share.

    Args:
      weights: of the subsets in the sample; empty takes them as they come.
    """
    files = [item for item in found.inputs if item.source and not item.heldout]
    if files:
        return _sample(
            found, files, weights, Stage(report, "training the tokenizer", SAMPLE)
        ), SAMPLE
    documents = [part.document for item in found.inputs for part in item.parts if not part.heldout]
    total = sum(document.size for document in documents)
    stage = Stage(report, "training the tokenizer", total)

    def texts() -> Iterator[str]:
        for document in documents:
            yield document.read()
            stage.advance(document.size)

    return texts(), total


def _sample(
    found: Found, files: list[Input], weights: Mapping[str, float], stage: Stage
) -> Iterator[str]:
    total = sum(weights.values())
    most = {subset: SAMPLE * weight / total for subset, weight in weights.items()}
    taken: Counter[str] = Counter()
    # Multiples of a large odd number are spread evenly, and not drawn by chance.
    order = sorted(range(len(files)), key=lambda i: i * 0x9E3779B1 % 2**32)
    for i in order:
        left = SAMPLE // min(len(files), _FILES)
        source = files[i].source
        assert source is not None
        for record in read_records(str(source.path)):
            if isinstance(record, Bad) or is_held_out(hash_of(record.text.encode()), found.share):
                continue
            if weights and taken[record.subset] >= most.get(record.subset, 0):
                continue
            yield record.text
            stage.advance(len(record.text))
            taken[record.subset] += len(record.text)
            left -= len(record.text)
            if left <= 0:
                break
        if taken.total() >= SAMPLE:
            return
