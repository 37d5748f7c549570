"""How long steps wait for checkpoints: a run's own figures (`checkpoint_wait` of metrics.jsonl).

    python benchmarks/checkpoints.py [--every 200] [--json FILE] [--SECTION.FIELD VALUE …]

Trains latte_tiny on this machine in a new run directory. A checkpoint is written while the steps
after it run; what they wait for is the copy of the state, its fingerprints, and the checkpoint
before, where that is not done yet. Prints the waits, and the share of the time from one checkpoint
to the next that they are.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from latte.config import apply_overrides, load, validate
from latte.metrics import read_metrics
from latte.train import train

INTERVALS = 3
"""Checkpoints that are waited for; the one before them also compiles."""


def measure(every: int, overrides: list[str]) -> dict:
    steps = str(every * (INTERVALS + 1) + 1)
    settings = {
        "train.steps": steps,
        "train.checkpoint_every": str(every),
        "train.eval_every": steps,
        "train.sample_tokens": "0",
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    config = validate(apply_overrides(load("latte_tiny"), [*words, *overrides]))
    with tempfile.TemporaryDirectory() as made:
        run_dir = Path(made) / "run"
        start = time.perf_counter()
        train(config, run_dir)
        took = time.perf_counter() - start
        records = list(read_metrics(run_dir / "metrics.jsonl"))
        kept = run_dir / "checkpoints" / str(every * INTERVALS)
        size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    waits = [r["checkpoint_wait"] for r in records if "checkpoint_wait" in r][1:]
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    tokens = config.train.batch_size * config.train.sequence_length
    step = tokens / statistics.median(speeds)
    return {
        "steps_between": every,
        "checkpoint_bytes": size,
        "seconds_a_step": step,
        "waits": waits,
        "share": statistics.mean(waits) / (every * step + statistics.mean(waits)),
        "run_seconds": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options, overrides = parser.parse_known_args()
    found = measure(options.every, overrides)
    print(
        f"{found['checkpoint_bytes'] / 1e6:.1f} MB every {found['steps_between']} steps of "
        f"{1e3 * found['seconds_a_step']:.0f} ms: steps wait "
        f"{', '.join(f'{1e3 * wait:.0f}' for wait in found['waits'])} ms, "
        f"{found['share']:.2%} of the time"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
