"""The Pile without the sets that are known to be under copyright, in the layout of the whole.

`train/{00..29}.jsonl.zst`, `val.jsonl.zst` and `test.jsonl.zst`; Books3, BookCorpus2,
OpenSubtitles, YoutubeSubtitles and OpenWebText2 are left out. With --data.path it is a copy of
these files.
"""

from collections.abc import Iterator

from latte.data.corpus import Source
from latte.data.fetch import list_files

ROOT = "https://huggingface.co/datasets/monology/pile-uncopyrighted/resolve/main"
TRAIN_FILES = 30
SUBSETS = frozenset(
    {
        "ArXiv",
        "DM Mathematics",
        "Enron Emails",
        "EuroParl",
        "FreeLaw",
        "Github",
        "Gutenberg (PG-19)",
        "HackerNews",
        "NIH ExPorter",
        "PhilPapers",
        "Pile-CC",
        "PubMed Abstracts",
        "PubMed Central",
        "StackExchange",
        "USPTO Backgrounds",
        "Ubuntu IRC",
        "Wikipedia (en)",
    }
)


def sources(root: str) -> Iterator[Source]:
    """Yields the files of the corpus, there or not."""
    found = list_files(root)
    names = [f"train/{i:02}.jsonl.zst" for i in range(TRAIN_FILES)]
    for name in [*names, "val.jsonl.zst", "test.jsonl.zst"]:
        yield Source(name, f"{root}/{name}", name not in names, found.get(name, ""))
