"""Tokens per second with all requests constrained, against none, in turns on one server.

    python benchmarks/structured_output.py [--concurrency 8] [--requests 32] [--rounds 3] [--save]

Each request has 128 random tokens in and 64 out. A constrained one follows a JSON Schema whose instances are
longer. `--url`: a running server, of another version for instance, instead of one of its own.
"""

import argparse
import asyncio
import contextlib
import time
from random import Random
from statistics import median
from typing import Any

import aiohttp
import machine
from serving import VOCABULARY, own_server

PROMPT_TOKENS, OUT = 128, 64
SCHEMA = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["first", "second", "third"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "items", "schema": SCHEMA}}}
FREE: dict[str, Any] = {"ignore_eos": True}


async def round_of(session: aiohttp.ClientSession, model: str, fields: dict[str, Any], count: int, limit: int) -> float:
    """Tokens per second."""
    places, random = asyncio.Semaphore(limit), Random()

    async def one() -> int:
        prompt = [random.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": OUT, "temperature": 1, **fields}
        async with places, session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            return int((await answer.json())["usage"]["completion_tokens"])

    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one() for _ in range(count))))
    assert tokens == count * OUT, "an answer was shorter than the others"
    return tokens / (time.perf_counter() - started)


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"free": [], "constrained": []}
    timeout = aiohttp.ClientTimeout(1200)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get("/v1/models") as answer:
            model = str((await answer.json())["data"][0]["id"])
        kinds = {"free": FREE} if arguments.only_free else {"free": FREE, "constrained": FORMAT}
        for fields in kinds.values():
            await round_of(session, model, fields, 4, 4)  # warm-up
        for _ in range(arguments.rounds):
            for name, fields in kinds.items():
                speed = await round_of(session, model, fields, arguments.requests, arguments.concurrency)
                found[name].append(speed)
                print(f"{name:12s} {speed:8.1f} tok/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-free", action="store_true", help="without constrained requests")
    parser.add_argument("--save", action="store_true", help="append to results/structured_output.jsonl")
    arguments = parser.parse_args()
    server = contextlib.nullcontext(arguments.url) if arguments.url else own_server(arguments.model)
    with server as url:
        found = asyncio.run(measure(url, arguments))
    result = {name: round(median(speeds), 1) for name, speeds in found.items() if speeds}
    if "constrained" in result:
        result["ratio"] = round(result["constrained"] / result["free"], 3)
    print(result)
    if arguments.save:
        print(machine.save("structured_output", {"tokens_per_second": result, "concurrency": arguments.concurrency}))


if __name__ == "__main__":
    main()
