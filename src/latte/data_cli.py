"""The commands `latte data …`."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latte.cli import Parser, add_json, configured, folder_of, print_values
from latte.config import Config, read_run_config, validate
from latte.errors import UserError
from latte.values import parse_mixture

_SHORT = {
    "tokenizer": "data.tokenizer",
    "vocab": "data.tokenizer_vocab",
    "skip_bad": "data.skip_bad",
}
"""Options that stand for settings."""
_LARGEST = 1 << 18
"""Pieces of a vocabulary at most."""


def _prepare(parser: Parser, argv: list[str]) -> int:
    parser.add_argument(
        "--out", metavar="FOLDER_OR_URL", help="where the store goes; by default to data.cache"
    )
    parser.add_argument("--ray", default="", metavar="ADDRESS", help="a Ray cluster to do it")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes of this machine; 1 for this one alone, by default all cores where it pays",
    )
    add_json(parser)
    options, config = _of_corpus(parser, argv, "tokenizer", "skip_bad")
    if config is None:
        return 0
    if options.out is None and (options.ray or options.workers):
        raise UserError("--ray and --workers need --out FOLDER_OR_URL, where the store goes")
    if options.workers < 0:
        raise UserError(f"--workers is {options.workers}, but it must be at least 0")
    from latte.data.engine import Engine
    from latte.data.prepare import prepare, prepare_at

    if options.out is None:
        store = prepare(config.data)
    else:
        store = prepare_at(config.data, options.out, Engine(options.ray, options.workers))
    values: dict[str, Any] = {"store": str(store.place), "vocab_size": store.manifest.vocab_size}
    for split, count in store.manifest.splits.items():
        values |= {f"{split}_{name}": n for name, n in asdict(count).items()}
    print_values(values, options.json)
    return 0


def _tokenizer(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--out", metavar="FILE", help="the .model file to write")
    parser.add_argument(
        "--kind", choices=("bpe", "unigram"), default="bpe", help="kind of model (%(default)s)"
    )
    add_json(parser)
    options, config = _of_corpus(parser, argv, "vocab", "skip_bad")
    if config is None:
        return 0
    if options.out is None or not options.out.endswith(".model"):
        raise UserError("--out is missing or no .model file; give one, such as mine.model")
    vocab = config.data.tokenizer_vocab
    if vocab > _LARGEST:
        raise UserError(f"--vocab is {vocab}, but it must be at most {_LARGEST}")
    from latte.data.inputs import find_inputs
    from latte.data.progress import show_progress
    from latte.data.sample import training_texts
    from latte.data.tokenizer import train_sentencepiece

    with show_progress() as report:
        found = find_inputs(config.data, report)
        stages = parse_mixture(config.data.mixture) or [(0, dict(found.corpus.weights))]
        texts, characters = training_texts(found, stages[0][1], report)
        made = train_sentencepiece(texts, characters, vocab, options.kind)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_bytes(made.files()["tokenizer.model"])
    values = {"tokenizer": options.out, "vocab_size": made.vocab_size}
    print_values({**values, "fingerprint": made.fingerprint}, options.json)
    return 0


def _verify(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--full", action="store_true", help="read every file for its checksum")
    options = _of_store(parser, argv)
    if options is None:
        return 0
    from latte.data.place import Place
    from latte.data.progress import show_progress
    from latte.data.verify import verify

    start = time.monotonic()
    with show_progress() as report:
        manifest = verify(
            Place(options.store),
            full=options.full,
            progress=lambda done, total: report("verifying", done, total),
        )
    values: dict[str, Any] = {"store": options.store, "shards": manifest.shards}
    values |= {"bytes": manifest.bytes, "checked": "checksums" if options.full else "sizes"}
    print_values({**values, "seconds": round(time.monotonic() - start, 3)}, options.json)
    return 0


def _stats(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--plot", metavar="FILE", help="a .png to draw")
    options = _of_store(parser, argv)
    if options is None:
        return 0
    from latte.data.stats import sample_lengths, store_stats
    from latte.data.store import TokenStore

    store = TokenStore.open(options.store)
    stats = store_stats(store)
    if options.plot:
        from latte.plots import corpus

        lengths = {s.subset: sample_lengths(s) for s in store.split("train")}
        corpus(stats, lengths, Path(options.plot), title=store.manifest.corpus)
    if options.json:
        print(json.dumps([some._asdict() for some in stats]))
        return 0
    heads = ("split", "subset", "tokens", "documents", "MB", "bytes/token", "10%", "50%", "90%")
    table = [
        (
            *(some.split, some.subset, f"{some.tokens:,}", f"{some.documents:,}"),
            *(f"{some.bytes / 1e6:,.1f}", f"{some.bytes_per_token:.3f}"),
            *(f"{length:,}" for length in some.lengths),
        )
        for some in stats
    ]
    _print_table((*heads, "longest"), table)
    return 0


def _show(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--run", metavar="DIR", help="the run whose step it is, or give --config")
    parser.add_argument("--step", type=int, default=1, help="from 1, as a run counts (%(default)s)")
    parser.add_argument("--row", type=int, default=0, help="of the batch, from 0 (%(default)s)")
    add_json(parser)
    options, config = _of_corpus(parser, argv)
    if config is None:
        return 0
    if options.run:
        config = read_run_config(folder_of(options.run))
    train = config.train
    if options.step < 1:
        raise UserError(f"--step is {options.step}, but it must be at least 1")
    if not 0 <= options.row < train.batch_size:
        raise UserError(f"--row is {options.row}, but a batch has rows 0 to {train.batch_size - 1}")
    from latte.data.loader import Loader
    from latte.data.prepare import prepare
    from latte.data.show import show_row

    store = prepare(config.data)
    size = train.batch_size, train.sequence_length
    loader = Loader(store, "train", train.seed, *size, data=config.data)
    shown = show_row(loader, options.step - 1, options.row)
    if options.json:
        print(json.dumps([piece._asdict() for piece in shown]))
        return 0
    for piece in shown:
        where = f"{piece.file}:{piece.line}" if piece.line else piece.file
        print(
            f"--- {where}  {piece.subset}, epoch {piece.epoch}, shard {piece.shard}, document "
            f"{piece.document}, tokens {piece.start} to {piece.start + piece.tokens}"
        )
        print(piece.text)
    epochs = loader.epochs(options.step - 1).items()
    print(f"--- epochs before: {', '.join(f'{name} {count:.3f}' for name, count in epochs)}")
    return 0


def _of_corpus(
    parser: Parser, argv: list[str], *short: str
) -> tuple[argparse.Namespace, Config | None]:
    """The options of a command that reads a corpus, and the config; None once help is shown."""
    parser.add_argument(
        "--corpus", metavar="NAME_OR_PATH", help="a corpus of data/, or a file, folder or URL"
    )
    for name in short:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar="VALUE", help=f"short for --{_SHORT[name]}")
    options, config = configured(parser, argv, default=Config(name="data"))
    if config is None:
        return options, None
    from latte.config import apply_overrides
    from latte.data.corpus import CORPORA

    given: list[str] = []
    if options.corpus:
        named = options.corpus.endswith(".py") or (CORPORA / f"{options.corpus}.py").is_file()
        given += ["--data.corpus" if named else "--data.path", options.corpus]
    for name in short:
        if getattr(options, name) is not None:
            given += [f"--{_SHORT[name]}", getattr(options, name)]
    return options, validate(apply_overrides(config, given))


def _of_store(parser: Parser, argv: list[str]) -> argparse.Namespace | None:
    """The options of a command that reads a store; None once help is shown."""
    parser.add_argument("store", nargs="?", metavar="STORE", help="its folder, or gs:// or s3://")
    add_json(parser)
    options = parser.options(argv)
    if options is None:
        return None
    if options.store is None:
        raise UserError(f"STORE is missing; see `{parser.prog} --help`")
    return options


def _print_table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Two columns of words, then numbers."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=sys.stdout)


COMMANDS: dict[str, tuple[Callable[[Parser, list[str]], int], str]] = {
    "prepare": (_prepare, "tokenise a corpus into a token store, or what is missing of it"),
    "tokenizer": (_tokenizer, "train a sentencepiece tokenizer on a sample of a corpus"),
    "verify": (_verify, "check that a token store is whole"),
    "stats": (_stats, "tokens, documents and lengths of a token store, by subset"),
    "show": (_show, "the text that a step of a run trains on, and where it came from"),
}
