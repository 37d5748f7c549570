"""Writing text: time and memory a token, from the first to the last, on this machine's accelerator.

    python benchmarks/decode.py [--configs latte_150m transformer_150m] [--batches 16 128]
        [--prompts 20 4096] [--json FILE]
    python benchmarks/decode.py --long 100000 [--configs latte_tiny]

The first form writes `--tokens` after prompts of random tokens, a whole batch at a time, as in the
paper's Table 9, beside the time that reading the parameters and the states once would take at the
bandwidth of a copy in this process. The second writes one long text, and prints the time of a token
and the bytes of the state as they go.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from timing import copy_rate

from latte.config import load
from latte.environment import describe
from latte.generate import Sampling, draw, prefill
from latte.model import LanguageModel

GREEDY = Sampling(temperature=0)
_STRIDE = 64


def make(name: str, *, vocab: int) -> LanguageModel:
    """A model of random parameters, kept in the type that products are taken in."""
    config = load(name).model
    shape = replace(config, vocab_size=config.vocab_size or vocab, max_length=1024)
    whole = jax.jit(lambda: LanguageModel(shape, key=jax.random.key(0)))()
    return jax.tree.map(lambda x: x.astype(shape.dtype) if x.ndim > 2 else x, whole)


def size_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def measure(model: LanguageModel, batch: int, prompt: int, tokens: int) -> dict[str, float]:
    """Seconds to read prompts, and to write; the best of three."""
    vocab = model.backbone.config.vocab_size
    rows = np.random.default_rng(0).integers(0, vocab, (batch, prompt)).astype(np.int32)
    segments, best = np.zeros_like(rows), {"prefill": np.inf, "decode": np.inf}
    drawing: Any = None
    for _ in range(4):  # the first one compiles
        start = time.perf_counter()
        drawing = prefill(model, rows, segments, room=prompt + tokens, vocab=vocab)
        jax.block_until_ready(drawing)
        middle = time.perf_counter()
        settings = {"count": tokens, "sampling": GREEDY, "end": -1, "vocab": vocab}
        drawing, _ = draw(model, drawing, jax.random.key(0), **settings)
        jax.block_until_ready(drawing)
        end = time.perf_counter()
        best = {
            "prefill": min(best["prefill"], middle - start),
            "decode": min(best["decode"], end - middle),
        }
    read = size_of(model) + size_of(drawing.state)
    return {
        "tokens_per_second": batch * tokens / best["decode"],
        "prefill_s": best["prefill"],
        "token_ms": 1e3 * best["decode"] / tokens,
        "state_bytes": size_of(drawing.state),
        "bytes_read": read,
    }


def write_long(model: LanguageModel, tokens: int) -> list[dict[str, float]]:
    """Time of a token and bytes of the state after so many tokens of one text."""
    vocab = model.backbone.config.vocab_size
    prompt = np.zeros((1, 1), np.int32)
    drawing = prefill(model, prompt, np.zeros_like(prompt), room=1, vocab=vocab)
    found, written, mark = [], 0, 1000
    settings = {"count": _STRIDE, "sampling": GREEDY, "end": -1, "vocab": vocab}
    drawing, _ = draw(model, drawing, jax.random.key(0), **settings)
    times: list[float] = []
    while written < tokens:
        start = time.perf_counter()
        drawing, _ = draw(model, drawing, jax.random.key(0), **settings)
        jax.block_until_ready(drawing)
        times.append((time.perf_counter() - start) / _STRIDE)
        written += _STRIDE
        if written >= mark or written >= tokens:
            row = {"tokens": written, "token_ms": 1e3 * float(np.median(times))}
            found.append({**row, "state_bytes": size_of(drawing.state)})
            print(
                f"{written:8,} tokens  {row['token_ms']:.3f} ms a token  "
                f"{size_of(drawing.state):,} bytes of state",
                flush=True,
            )
            mark, times = mark * (10 if mark < 10_000 else 3), []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=["latte_150m", "transformer_150m"])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--prompts", type=int, nargs="+", default=[20])
    parser.add_argument("--tokens", type=int, default=256, help="to write (%(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="where a config has none")
    parser.add_argument("--long", type=int, help="write one text of so many tokens instead")
    parser.add_argument("--json", type=Path, help="write figures, versions and device to this file")
    options = parser.parse_args()
    rate, rows = copy_rate(3) if options.long is None else 0.0, []
    for name in options.configs:
        model = make(name, vocab=options.vocab)
        if options.long is not None:
            rows += [{"config": name, **row} for row in write_long(model, options.long)]
            continue
        for batch in options.batches:
            for prompt in options.prompts:
                row = measure(model, batch, prompt, options.tokens)
                row["floor_ms"] = 1e3 * row["bytes_read"] / rate
                rows.append({"config": name, "batch": batch, "prompt": prompt, **row})
                print(
                    f"{name:18} batch {batch:4} after {prompt:6}  "
                    f"{row['tokens_per_second']:10,.0f} tokens/s  {row['token_ms']:.3f} ms a token "
                    f"(floor {row['floor_ms']:.3f})  {row['state_bytes'] / 1e6:,.1f} MB of state",
                    flush=True,
                )
    if options.json:
        found = {"environment": describe(), "copy_bytes_per_second": rate, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
