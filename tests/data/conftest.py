"""Small corpora on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest

from latte.config import DataConfig
from latte.data.prepare import prepare
from latte.data.store import TokenStore

WORDS = ("state", "gate", "latent", "chunk", "é\t", "\n\n", "  ", "😀", "def f():\n\treturn")


def document(number: int) -> str:
    """A text of its own for each number, of very different lengths."""
    words = (WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(3 + number * 37 % 90))
    return f"{number} " + " ".join(words)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of 40 documents, some of them in subfolders."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        file = folder / ("deep/er" if number % 3 else "") / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document(number))
    return folder


@pytest.fixture
def bytes_config(corpus, tmp_path) -> DataConfig:
    """The corpus as bytes, in a cache of the test's own."""
    return DataConfig(
        path=str(corpus), tokenizer="bytes", heldout=0.2, cache=str(tmp_path / "cache")
    )


@pytest.fixture(scope="session")
def store(corpus, tmp_path_factory) -> TokenStore:
    """The corpus as bytes; for tests that only read."""
    cache = tmp_path_factory.mktemp("cache")
    return prepare(DataConfig(path=str(corpus), tokenizer="bytes", heldout=0.2, cache=str(cache)))


@pytest.fixture
def make_folder(tmp_path) -> Callable[[dict[str, bytes]], Path]:
    """Makes a folder of files."""

    def make(files: dict[str, bytes]) -> Path:
        for name, content in files.items():
            file = tmp_path / "made" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return tmp_path / "made"

    return make
