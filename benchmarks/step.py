"""Whole training steps of configs, on this machine's accelerator: tokens a second, and MFU.

    python benchmarks/step.py [--configs latte_400m transformer_400m] [--lengths 4096] [--json FILE]
    python benchmarks/step.py --document 0 --model.remat dots --model.unroll true

Rows are packed from documents of about 1,000 random tokens, or of --document; with 0 each row is
one document, and attention in full is cuDNN's on a GPU. Other options are settings of the configs.
Each length takes the same number of tokens a step. MFU counts the model's arithmetic without
recomputation (`latte.cost.training_flops_per_token`) over the peak of the device, and beside it
over what a product of two 8,192² bfloat16 matrices reaches in this process.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from timing import milliseconds, product_rate

from latte.config import Config, apply_overrides, load
from latte.cost import count_parameters, shapes, training_flops_per_token
from latte.data.batch import Batch, cut_batch
from latte.environment import describe
from latte.layers import attention
from latte.speed import peak_flops
from latte.train import initial_state, train_step


def packed_rows(config: Config, document: int = 1000) -> Batch:
    """Random rows in which documents of so many tokens end anywhere; 0 for none that ends."""
    train, rng = config.train, np.random.default_rng(0)
    shape = train.batch_size, train.sequence_length + 1
    rows = rng.integers(1, config.model.vocab_size, shape, dtype=np.int32)
    if document:
        rows[rng.random(shape) < 1 / document] = 0
    return cut_batch(rows, separator=0)


def tell_attention_that_rows_are_whole() -> None:
    """Leaves out the segment ids, which cuDNN does not take."""
    attention.run_op = lambda op, arrays, _, state: op(*arrays, state=state)


def measure(config: Config, document: int, calls: int) -> dict[str, float]:
    """Times steps that go on from one another, as in a run."""
    batch = jax.device_put(packed_rows(config, document))
    step = jax.jit(partial(train_step, config), donate_argnums=0)
    state = jax.jit(partial(initial_state, config))()
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()

    def go() -> jax.Array:
        nonlocal state
        state, report = compiled(state, batch)
        return report.loss

    took = milliseconds(go, calls=calls) / 1e3
    tokens = config.train.batch_size * config.train.sequence_length
    flops = training_flops_per_token(config.model, config.train.sequence_length)
    return {
        "parameters": count_parameters(shapes(config.model)),
        "step_ms": 1e3 * took,
        "tokens_per_second": tokens / took,
        "model_tflops": tokens * flops / took / 1e12,
        "compile_s": compile_s,
        "temp_gb": memory.temp_size_in_bytes / 1e9 if memory else 0.0,
        "loss": float(go()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=["latte_400m", "transformer_400m"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=65536, help="a step (%(default)s)")
    parser.add_argument("--calls", type=int, default=3, help="steps that are timed together")
    parser.add_argument("--json", type=Path, help="write figures, versions and device to this file")
    parser.add_argument(
        "--document", type=int, default=1000, help="mean tokens of a document; 0: one a row"
    )
    options, overrides = parser.parse_known_args()
    if not options.document:
        tell_attention_that_rows_are_whole()
    rate = product_rate(10)
    peak = peak_flops(jax.devices()[0].device_kind) or rate
    rows = []
    for name in options.configs:
        for length in options.lengths:
            config = apply_overrides(load(name), overrides)
            train = replace(
                config.train, sequence_length=length, batch_size=options.tokens // length
            )
            row = measure(replace(config, train=train), options.document, options.calls)
            flops = row["model_tflops"] * 1e12
            row |= {"mfu": flops / peak, "of_product": flops / rate}
            given = {"document": options.document, "settings": overrides}
            rows.append({"config": name, "length": length, **given, **row})
            print(
                f"{name:18} T {length:6} {row['tokens_per_second']:10,.0f} tokens/s  "
                f"MFU {row['mfu']:.1%} ({row['of_product']:.1%} of a product's rate)  "
                f"{row['step_ms']:.0f} ms  {row['temp_gb']:.1f} GB",
                flush=True,
            )
    if options.json:
        found = {"environment": describe(), "product_tflops": rate / 1e12, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
