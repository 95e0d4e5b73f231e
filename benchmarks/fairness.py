"""TTFT of one tenant, alone and while another one floods the server within its limits.

    python benchmarks/fairness.py [--flood 32] [--requests 10] [--rounds 3] [--max-num-seqs 8] [--same-key] [--save]

Starts a server with two API keys. One tenant sends one request at a time, of 128 random tokens with 8 out; the other
one keeps `--flood` requests open, each of 256 tokens with 64 out. Rounds alternate between idle and flood. The client
uses the same processors. `--same-key`: both send the same key, to compare with a server that is not fair.
"""

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import machine
from serving import VOCABULARY, Request, ask, own_server, percentile

KEYS = {"quiet": "quiet-tenant-key", "flood": "flood-tenant-key"}
PAUSE_SECONDS = 5.0
QUIET, FLOOD = (128, 8), (256, 64)  # tokens in and out


def request(random: Random, shape: tuple[int, int]) -> Request:
    tokens, length = shape
    return [random.randrange(10, VOCABULARY) for _ in range(tokens)], length


def client(url: str, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url,
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(1200),
    )


@contextlib.asynccontextmanager
async def flooding(session: aiohttp.ClientSession, model: str, count: int, random: Random) -> Any:
    """Keeps `count` requests open."""

    async def repeat() -> None:
        while True:
            await ask(session, model, request(random, FLOOD))

    tasks = [asyncio.create_task(repeat()) for _ in range(count)]
    try:
        if tasks:
            await asyncio.sleep(PAUSE_SECONDS)
        yield
        if failed := next((task for task in tasks if task.done()), None):
            failed.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """TTFT of each request, in seconds."""
    random = Random()
    firsts: dict[str, list[float]] = {"idle": [], "flood": []}
    key = KEYS["quiet" if arguments.same_key else "flood"]
    async with client(url, KEYS["quiet"]) as quiet, client(url, key) as other:
        async with quiet.get("/v1/models") as answer:
            model = str((await answer.json())["data"][0]["id"])
        await ask(quiet, model, request(random, QUIET))  # warm-up
        for _ in range(arguments.rounds):
            for name, count in (("idle", 0), ("flood", arguments.flood)):
                async with flooding(other, model, count, random):
                    for _ in range(arguments.requests):
                        firsts[name].append((await ask(quiet, model, request(random, QUIET))).ttft)
    return firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--flood", type=int, default=32, help="requests that the other tenant keeps open")
    parser.add_argument("--requests", type=int, default=10, help="of the measured tenant, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--same-key", action="store_true")
    parser.add_argument("--save", action="store_true", help="append to results/fairness.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
        keys.chmod(0o600)
        flags = ["--api-keys-file", str(keys), "--max-num-seqs", str(arguments.max_num_seqs)]
        with own_server(arguments.model, *flags) as url:
            firsts = asyncio.run(measure(url, arguments))
    result = {
        name: {"p50_ms": round(1e3 * median(values), 1), "p99_ms": round(1e3 * percentile(values, 0.99), 1)}
        for name, values in firsts.items()
    }
    for name, row in result.items():
        print(f"{name:6s} TTFT p50 {row['p50_ms']:9.1f} ms   p99 {row['p99_ms']:9.1f} ms", flush=True)
    if arguments.save:
        print(machine.save("fairness", {"ttft": result, "same_key": arguments.same_key}))


if __name__ == "__main__":
    main()
