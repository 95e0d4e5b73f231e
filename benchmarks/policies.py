"""Policies side by side on real replicas, over HTTP: chats that share long prefixes.

    python benchmarks/policies.py [--policies a,b] [--replicas 4] [--groups 12] [--turns 6] [--concurrency 8]
                                  [--rounds 2] [--cache 64MiB] [--model smollm2] [--save]

Each group is a system prompt of `--prefix` characters and `--turns` questions about it; the requests of all groups come
in a random order, `--concurrency` at a time. Every policy gets a server of its own with the same requests, and the
policies take turns (A B C A B C). Hits are the replicas' own counters; the error is that of the predicted time to the
first token (`headrace_first_token_prediction_error`), between the bounds of a histogram's buckets.
"""

import argparse
import asyncio
import json
import re
import time
from random import Random
from statistics import median
from typing import Any

import aiohttp
import machine
from serving import Timing, first_model, own_server, percentile

WORDS = ["river", "stone", "lamp", "orchard", "metal", "window", "paper", "engine", "harbour", "violin", "winter"]


def prompts(arguments: argparse.Namespace, random: Random) -> list[list[dict[str, str]]]:
    """The messages of each chat request, in their order."""
    found = []
    for group in range(arguments.groups):
        text = " ".join(random.choice(WORDS) for _ in range(arguments.prefix // 7))
        system = {"role": "system", "content": f"Group {group}. {text}"}
        found += [
            [system, {"role": "user", "content": f"Question {turn}: {' '.join(random.choices(WORDS, k=12))}?"}]
            for turn in range(arguments.turns)
        ]
    random.shuffle(found)
    return found


async def ask(session: aiohttp.ClientSession, model: str, messages: list[dict[str, str]], length: int) -> Timing:
    """Streams one answer. Raises RuntimeError on an error."""
    body = {"model": model, "messages": messages, "max_tokens": length, "ignore_eos": True, "temperature": 0}
    timing = Timing(time.perf_counter())
    async with session.post("/v1/chat/completions", json=body | {"stream": True}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                timing.last = time.perf_counter()
                timing.first = timing.first or timing.last
                timing.tokens += 1
    return timing


async def drive(url: str, work: list[list[dict[str, str]]], arguments: argparse.Namespace) -> dict[str, float]:
    """Runs all of it; figures of the run."""
    model = await first_model(url)
    slots = asyncio.Semaphore(arguments.concurrency)

    async def one(session: aiohttp.ClientSession, messages: list[dict[str, str]]) -> Timing:
        async with slots:
            return await ask(session, model, messages, arguments.length)

    options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(1200)}
    async with aiohttp.ClientSession(url, **options) as session:
        warm = [one(session, [{"role": "user", "content": f"warm-up {turn} " * 20}]) for turn in range(12)]
        await asyncio.gather(*warm)
        before = await scrape(session)
        began = time.perf_counter()
        timings = await asyncio.gather(*(one(session, messages) for messages in work))
        seconds = time.perf_counter() - began
        after = await scrape(session)
    firsts = [timing.first - timing.began for timing in timings]
    counted = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    buckets = sorted(
        (float(bound), sum(value for name, value in counted.items() if name.startswith(f"error {bound} ")))
        for bound in {name.split()[1] for name in counted if name.startswith("error ")}
    )
    return {
        "requests_per_second": len(work) / seconds,
        "ttft_p50": median(firsts),
        "ttft_p90": percentile(firsts, 0.9),
        "hit_rate": counted["hits"] / max(1.0, counted["queries"]),
        "fetched_mib": counted["fetched"] / 2**20,
        "error_p50": _quantile(buckets, 0.5),
        "error_p90": _quantile(buckets, 0.9),
    }


async def scrape(session: aiohttp.ClientSession) -> dict[str, float]:
    """The counters of all replicas together, and the buckets of the error."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found: dict[str, float] = {"hits": 0.0, "queries": 0.0, "fetched": 0.0}
    names = {
        "vllm:prefix_cache_hits_total": "hits",
        "vllm:prefix_cache_queries_total": "queries",
        "headrace_kv_fetched_bytes_total": "fetched",
    }
    for line in lines:
        name, _, rest = line.partition("{")
        if name in names:
            found[names[name]] += float(rest.rsplit(" ", 1)[1])
        elif name == "headrace_first_token_prediction_error_bucket":
            bound, replica = re.search(r'le="([^"]+)"', rest), re.search(r'replica="([^"]+)"', rest)
            if bound and replica:
                found[f"error {bound[1]} {replica[1]}"] = float(rest.rsplit(" ", 1)[1])
    return found


def _quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """The upper bound of the bucket; NaN without samples."""
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if total and count >= share * total), float("nan"))


def main() -> None:
    """Prints a line per run, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="predicted,least-load,round-robin")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prefix", type=int, default=2400, help="characters of each group's system prompt")
    parser.add_argument("--length", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache", default="64MiB", help="KV cache of a replica")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in arguments.policies.split(",")}
    for round_number in range(arguments.rounds):
        for policy, done in runs.items():
            flags = ["--replicas", str(arguments.replicas), "--policy", policy, "--kv-cache-memory", arguments.cache]
            flags += ["--max-model-len", "1024", "--cpu-threads", "1"]
            with own_server(arguments.model, *flags) as url:
                done.append(asyncio.run(drive(url, prompts(arguments, Random(round_number)), arguments)))
            shown = ", ".join(f"{name} {value:.3f}" for name, value in done[-1].items())
            print(f"round {round_number} {policy:<12} {shown}", flush=True)
    medians = {policy: {name: median(run[name] for run in done) for name in done[0]} for policy, done in runs.items()}
    for policy, row in medians.items():
        print(f"{policy:<12} " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    if arguments.save:
        print(machine.save("policies", {"medians": medians, "runs": runs}))


if __name__ == "__main__":
    main()
