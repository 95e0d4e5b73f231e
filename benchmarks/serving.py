"""Speed of the whole path: HTTP, router, gRPC, Ray actor, engine.

    python benchmarks/serving.py                                    starts a server
    python benchmarks/serving.py --base-url http://127.0.0.1:8000   measures a running server, Headrace or another
    options: --workloads equal,mixed --concurrency 1,8,32 --rounds 3 --peers engine,generate --save

Workloads (random prompts of 128 tokens, greedy, end-of-sequence ignored, streamed):
    equal   64 tokens out each
    mixed   8 to 256 tokens out
Per concurrency C: max(4, C) requests, C of them open at any time. TTFT is the time to the first event with tokens, TPOT
the mean time per token after the first of one request, ITL the time between two events of one request. The client is a
separate process and uses the same processors.

Peers alternate with the server, in this process, on the same requests and weights, without HTTP, C requests at a time
until all C are done: `engine`, the server's own engine, and `generate`, transformers' static batches. They have no
TTFT. `--peers ''` skips them.

Prefix caching has no effect: prompts are random and new in every round. `--base-url` needs /v1/completions with
token-id prompts, `ignore_eos` and `stream_options.include_usage`. aiohttp comes with Ray.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random, SystemRandom
from statistics import median
from typing import Any

import aiohttp
import machine

VOCABULARY = 49_000
PROMPT_TOKENS = 128
START_SECONDS = 180
Request = tuple[list[int], int]  # prompt, tokens to generate


@dataclass
class Timing:
    """Times of one request, measured by its client; seconds."""

    began: float
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between events
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.began

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


def workload(name: str, count: int, random: Random) -> list[Request]:
    """`count` requests; the mixed ones contain one of the greatest length."""
    lengths = [64] * count
    if name == "mixed":
        lengths = [*(random.randrange(8, 257) for _ in range(count - 1)), 256]
        random.shuffle(lengths)
    return [([random.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)], length) for length in lengths]


async def ask(session: aiohttp.ClientSession, model: str, request: Request) -> Timing:
    """Streams one completion. Raises RuntimeError on an error or a wrong length."""
    prompt, length = request
    body = {"model": model, "prompt": prompt, "max_tokens": length, "ignore_eos": True}
    body |= {"temperature": 0}
    timing = Timing(time.perf_counter())
    stamps: list[float] = []
    async with session.post(
        "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as answer:
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            elif event["choices"]:
                stamps.append(now)
    if timing.tokens != length or not stamps:
        raise RuntimeError(f"received {timing.tokens} tokens, requested {length}")
    timing.first, timing.last = stamps[0], stamps[-1]
    timing.gaps = [later - earlier for earlier, later in pairwise(stamps)]
    return timing


async def drive(url: str, model: str, work: list[Request], concurrency: int) -> tuple[list[Timing], float]:
    """Runs all of `work`, `concurrency` at a time: (timings, seconds from first to last)."""
    slots = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, request: Request) -> Timing:
        async with slots:
            return await ask(session, model, request)

    options: dict[str, Any] = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(1200)}
    async with aiohttp.ClientSession(url, **options) as session:
        began = time.perf_counter()
        timings = await asyncio.gather(*(one(session, request) for request in work))
        return timings, time.perf_counter() - began


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(timings: list[Timing], seconds: float) -> dict[str, float]:
    """Figures of one run; times in milliseconds."""
    firsts = [timing.ttft for timing in timings]
    gaps = [gap for timing in timings for gap in timing.gaps]
    return {
        "output_tok_s": round(sum(timing.tokens for timing in timings) / seconds, 1),
        "ttft_p50_ms": round(1e3 * median(firsts), 1),
        "ttft_p99_ms": round(1e3 * percentile(firsts, 0.99), 1),
        "tpot_p50_ms": round(1e3 * median(timing.tpot for timing in timings), 2),
        "itl_p99_ms": round(1e3 * percentile(gaps, 0.99), 1) if gaps else 0.0,
    }


@contextlib.contextmanager
def own_server(model: str, *more: str) -> Iterator[str]:
    """Runs `headrace serve` on free ports, with `more` flags; yields its URL."""
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "serve.log"
        environ = os.environ | {"HEADRACE_HOME": home, "NO_COLOR": "1"}
        flags = ["--port", "0", "--grpc-port", "0", "--admin-port", "0", "--kv-cache-memory", "2GiB"]
        with log.open("w") as file:
            command = [sys.executable, "-m", "headrace_cluster", "serve", model, *flags, *more]
            process = subprocess.Popen(command, env=environ, stderr=file, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (found := re.search(r"API +(http://\S+)/v1", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


async def first_model(url: str) -> str:
    async with aiohttp.ClientSession(url) as session, session.get("/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


class Peers:
    """Other ways to compute the same, in this process; loaded only if selected."""

    def __init__(self, names: list[str], source: str) -> None:
        self._runs: dict[str, Callable[[Sequence[list[int]], Sequence[int]], float]] = {}
        if names:
            import offline  # loads torch

            make = {
                "engine": lambda: offline.headrace(source),
                "generate": lambda: offline.transformers(offline.plain_model(source)),
            }
            if unknown := set(names) - make.keys():
                raise SystemExit(f"--peers are of {', '.join(make)}, not {', '.join(sorted(unknown))}")
            self._runs = {name: make[name]() for name in names}

    def run(self, concurrency: int, work: list[Request]) -> dict[str, float]:
        """Output tok/s of each on this work."""
        figures = {}
        for name, run in self._runs.items():
            seconds = 0.0
            for start in range(0, len(work), concurrency):
                prompts, lengths = zip(*work[start : start + concurrency], strict=True)
                seconds += run(prompts, lengths)
            figures[f"{name}_tok_s"] = round(sum(length for _, length in work) / seconds, 1)
        return figures


def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds, per workload and concurrency; rounds are interleaved."""
    peers = Peers([peer for peer in arguments.peers.split(",") if peer], arguments.model)
    for count in arguments.concurrency.split(","):  # warm-up
        peers.run(int(count), workload("equal", int(count), Random(0)))
    model = asyncio.run(first_model(url))
    random = Random(SystemRandom().getrandbits(64) if arguments.seed is None else arguments.seed)
    asyncio.run(drive(url, model, workload("equal", 2, random), 2))  # warm-up
    cases = [
        (name, int(count)) for name in arguments.workloads.split(",") for count in arguments.concurrency.split(",")
    ]
    runs: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for round_number in range(arguments.rounds):
        for name, concurrency in cases:
            work = workload(name, max(4, concurrency), random)
            figures = summarise(*asyncio.run(drive(url, model, work, concurrency)))
            runs[name, concurrency].append(figures | peers.run(concurrency, work))
            print(f"round {round_number} {name:5s} x{concurrency:<3d} {runs[name, concurrency][-1]}", flush=True)
    return {
        f"{name}/x{concurrency}": {key: median(run[key] for run in done) for key in done[0]}
        for (name, concurrency), done in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="of a running server; none = start one")
    parser.add_argument("--model", default="smollm2", help="the model to serve, if the server is started here")
    parser.add_argument("--workloads", default="equal,mixed")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="engine,generate", help="on --model's weights: of engine, generate")
    parser.add_argument("--seed", type=int, help="of the prompts; random by default, so that no prompt is repeated")
    parser.add_argument("--save", action="store_true", help="append to results/serving.jsonl")
    arguments = parser.parse_args()
    server = contextlib.nullcontext(arguments.base_url) if arguments.base_url else own_server(arguments.model)
    with server as url:
        result = measure(url, arguments)
    print(
        f"\n{'workload':12s}{'tok/s':>8s}{'TTFT p50':>10s}{'p99':>9s}{'TPOT':>8s}{'ITL p99':>9s}   (ms)   peers, tok/s"
    )
    for name, row in result.items():
        print(
            f"{name:12s}{row['output_tok_s']:8.1f}{row['ttft_p50_ms']:10.1f}{row['ttft_p99_ms']:9.1f}"
            f"{row['tpot_p50_ms']:8.2f}{row['itl_p99_ms']:9.1f}          "
            + ", ".join(f"{key} {row[f'{key}_tok_s']:.1f}" for key in arguments.peers.split(",") if key)
        )
    if arguments.save:
        print(machine.save("serving", {"medians": result, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
