"""OpenWebText: 8 million pages that Reddit linked to, about 9 billion tokens of GPT-2's tokenizer.

The parquet files of the `plain_text` folder, a page a row in its column `text`; nothing is held out
but what --data.heldout says. With --data.path it is a copy of that folder.
"""

from collections.abc import Iterator

from latte.data.corpus import Source
from latte.data.fetch import list_files

ROOT = "https://huggingface.co/datasets/Skylion007/openwebtext/resolve/refs%2Fconvert%2Fparquet"


def sources(root: str) -> Iterator[Source]:
    """Yields the parquet files that are at `root`."""
    for name, sha256 in list_files(root).items():
        if name.endswith(".parquet"):
            yield Source(name, f"{root}/{name}", sha256=sha256)
