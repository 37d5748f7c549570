"""Requests a second of a server of the OpenAI protocol, and how long each takes.

    latte serve --run runs/NAME --slots 64
    python benchmarks/load.py http://127.0.0.1:8000/v1 [--clients 64] [--requests 256] [--json FILE]

Each client asks for one completion after another, streamed; prompts are of several lengths. Any
server of the protocol will do, so that `transformers serve` or vLLM on the exported folder can be
measured beside it.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import numpy as np
import openai

WORDS = "It was the best of times, it was the worst of times, "


async def ask(client: openai.AsyncOpenAI, model: str, number: int, tokens: int) -> dict[str, float]:
    """Seconds to the first piece and to the last of one request, and the pieces that came."""
    start, first, pieces = time.perf_counter(), 0.0, 0
    stream = await client.completions.create(
        model=model,
        prompt=WORDS * (1 + number % 4),
        max_tokens=tokens,
        temperature=1,
        seed=number,
        stream=True,
    )
    async for _ in stream:
        first = first or time.perf_counter() - start
        pieces += 1
    return {"first": first, "whole": time.perf_counter() - start, "pieces": pieces}


async def load(url: str, clients: int, requests: int, tokens: int) -> tuple[list[dict], float]:
    """Every request's times, and the seconds of all."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
        model = (await client.models.list()).data[0].id
        await asyncio.gather(*(ask(client, model, i, 2) for i in range(4)))  # compiles
        numbers = iter(range(requests))

        async def work() -> list[dict]:
            return [await ask(client, model, number, tokens) for number in numbers]

        start = time.perf_counter()
        found = await asyncio.gather(*(work() for _ in range(clients)))
        return [one for some in found for one in some], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, took = asyncio.run(load(options.url, options.clients, options.requests, options.tokens))
    row: dict[str, float] = {
        "clients": options.clients,
        "requests": len(found),
        "requests_per_second": len(found) / took,
        "pieces_per_second": sum(one["pieces"] for one in found) / took,
    }
    for name in ("first", "whole"):
        for share in (50, 99):
            row[f"{name}_p{share}_s"] = float(np.percentile([one[name] for one in found], share))
    for name, value in row.items():
        print(f"{name:22}{value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
