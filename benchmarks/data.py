"""Preparing and reading tokens: how near to the bare tokenizer, and how far from waiting.

    python benchmarks/data.py --corpus FOLDER [--vocab 32768] [--json FILE]

A tokenizer is trained on the corpus, files of records. The bare tokenizer encodes the documents of
its first training file from memory, in one process, which the pipeline does too, from the file to
the committed shard. Then rows of 4,096 tokens are read back in batches of 64, as a run reads them.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path

from latte.config import DataConfig
from latte.data.corpus import Source
from latte.data.engine import Engine
from latte.data.inputs import find_inputs
from latte.data.loader import Loader
from latte.data.prepare import prepare_at
from latte.data.progress import show_progress
from latte.data.records import Record, read_records
from latte.data.sample import training_texts
from latte.data.store import TokenStore
from latte.data.tokenizer import Tokenizer, train_sentencepiece

_BATCH, _T = 64, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", required=True, help="a folder of files of records")
    parser.add_argument("--vocab", type=int, default=32_768, help="pieces (%(default)s)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, show_progress() as report:
        found = find_inputs(DataConfig(path=options.corpus), report)
        begun = time.perf_counter()
        tokenizer = train_sentencepiece(*training_texts(found, {}, report), options.vocab)
        tokenizer.save(Path(folder))
        figures = {"tokenizer_seconds": time.perf_counter() - begun}
        model = str(Path(folder, "tokenizer.model"))
        first = next(item.source for item in found.inputs if item.source and not item.heldout)
        figures |= compare(first, tokenizer, Path(folder), model)
        figures |= whole(options.corpus, Path(folder), model)
        for packing in ("cut", "fit"):
            figures[f"{packing}_tokens_per_second"] = read(Path(folder, "whole"), packing)
    figures["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for name, value in figures.items():
        print(f"{name:26}{value:,.3f}" if value < 1000 else f"{name:26}{value:,.0f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def compare(source: Source, tokenizer: Tokenizer, folder: Path, model: str) -> dict[str, float]:
    """MB/s of text in CPU time, which other work of the machine does not change."""
    records = read_records(str(source.path))
    texts = [record.text for record in records if isinstance(record, Record)]
    size = sum(len(text.encode()) for text in texts)
    begun = time.process_time()
    for text in texts:
        tokenizer.encode(text)
    bare = size / (time.process_time() - begun) / 1e6
    del texts
    config = DataConfig(path=str(source.path), tokenizer=model)
    begun = time.process_time()
    prepare_at(config, str(folder / "one"), Engine(workers=1))
    pipeline = size / (time.process_time() - begun) / 1e6
    shutil.rmtree(folder / "one")
    return {
        "bare_mb_per_second": bare,
        "pipeline_mb_per_second": pipeline,
        "share": pipeline / bare,
    }


def whole(corpus: str, folder: Path, model: str) -> dict[str, float]:
    """The corpus from its files to a verified store, on all cores."""
    begun = time.perf_counter()
    store = prepare_at(DataConfig(path=corpus, tokenizer=model), str(folder / "whole"), Engine())
    seconds = time.perf_counter() - begun
    counts = store.manifest.splits.values()
    tokens, size = sum(count.tokens for count in counts), sum(count.bytes for count in counts)
    return {
        "seconds": seconds,
        "mb_per_second": size / seconds / 1e6,
        "tokens": tokens,
        "bytes_per_token": size / tokens,
    }


def read(folder: Path, packing: str) -> float:
    """Tokens a second of the loader."""
    store = TokenStore.open(folder)
    data = DataConfig(packing="fit" if packing == "fit" else "cut")
    batches = Loader(store, "train", 0, _BATCH, _T, data=data).iterate()
    for _ in range(20):
        next(batches)
    begun = time.perf_counter()
    for _ in range(200):
        next(batches)
    return 200 * _BATCH * _T / (time.perf_counter() - begun)


if __name__ == "__main__":
    main()
