"""The Pile: 825 GiB of text in 22 sets, in the files as EleutherAI published them.

`train/{00..29}.jsonl.zst`, `val.jsonl.zst`, `test.jsonl.zst` and `SHA256SUMS.txt`, against which
every file is checked. A line is {"text": …, "meta": {"pile_set_name": …}}. It is no longer at its
old place: give a copy of these files with --data.path.
"""

from collections.abc import Iterator

from latte.data.corpus import Source
from latte.data.fetch import read_if_there

ROOT = "https://the-eye.eu/public/AI/pile"
TRAIN_FILES = 30
SUBSETS = frozenset(
    {
        "ArXiv",
        "BookCorpus2",
        "Books3",
        "DM Mathematics",
        "Enron Emails",
        "EuroParl",
        "FreeLaw",
        "Github",
        "Gutenberg (PG-19)",
        "HackerNews",
        "NIH ExPorter",
        "OpenSubtitles",
        "OpenWebText2",
        "PhilPapers",
        "Pile-CC",
        "PubMed Abstracts",
        "PubMed Central",
        "StackExchange",
        "USPTO Backgrounds",
        "Ubuntu IRC",
        "Wikipedia (en)",
        "YoutubeSubtitles",
    }
)


def sources(root: str) -> Iterator[Source]:
    """Yields the files of the corpus, there or not, with the checksums that lie beside them."""
    sums = {}
    for line in read_if_there(f"{root}/SHA256SUMS.txt").decode().splitlines():
        digest, _, name = line.partition(" ")
        sums[name.strip(" *").removeprefix("./")] = digest.lower()
    names = [f"train/{i:02}.jsonl.zst" for i in range(TRAIN_FILES)]
    for name in [*names, "val.jsonl.zst", "test.jsonl.zst"]:
        yield Source(name, f"{root}/{name}", name not in names, sums.get(name, ""))
