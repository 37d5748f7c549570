"""SlimPajama-627B: RedPajama, cleaned and deduplicated: 627 billion tokens in 895 GB of zst files.

`train/chunk{1..10}/example_train_{i}.jsonl.zst`, and for evaluation
`{validation,test}/chunk{1..5}/example_holdout_{i}.jsonl.zst`. A line is {"text": …, "meta":
{"redpajama_set_name": …}}. With --data.path it is a copy of these folders anywhere.
"""

from collections.abc import Iterator

from latte.data.corpus import Source
from latte.data.fetch import list_files

ROOT = "https://huggingface.co/datasets/cerebras/SlimPajama-627B/resolve/main"
TRAIN_FILES = (5912, 5911, 5919, 5917, 5933, 5915, 5906, 5921, 5920, 5912)
"""Training files of each chunk: they are 59,166 in all."""
WEIGHTS = {
    "RedPajamaCommonCrawl": 0.522,
    "RedPajamaC4": 0.267,
    "RedPajamaGithub": 0.052,
    "RedPajamaBook": 0.042,
    "RedPajamaArXiv": 0.046,
    "RedPajamaWikipedia": 0.038,
    "RedPajamaStackExchange": 0.033,
}
"""The published proportions, by tokens."""
SUBSETS = frozenset(WEIGHTS)


def sources(root: str) -> Iterator[Source]:
    """Yields every training file, there or not, and the held-out files that are at `root`."""
    found = list_files(root)
    for chunk, files in enumerate(TRAIN_FILES, 1):
        for i in range(files):
            name = f"train/chunk{chunk}/example_train_{i}.jsonl.zst"
            yield Source(name, f"{root}/{name}", sha256=found.get(name, ""))
    for name, sha256 in found.items():
        if name.startswith(("validation/", "test/")) and name.endswith(".jsonl.zst"):
            yield Source(name, f"{root}/{name}", heldout=True, sha256=sha256)
