"""KV blocks between replicas, in one run, interleaved: the cost and the gain of disaggregation.

1. GB/s of blocks that the source has cached, against a raw copy of equally large pieces by NIXL.
2. TTFT at low load: prompts computed by the replica that answers, and by a prefill replica.
3. ITL of running streams while long prompts arrive: two replicas that do both, against one for prefill and one for
   decode.

    PYTHONPATH=tests python benchmarks/transfer.py [--rounds N] [--save]

Processes of this machine, one thread each; the embedded model in float32.
"""

import argparse
import asyncio
import multiprocessing
import statistics
from random import Random
from typing import Any

import machine  # isort: skip  # before torch: it sets how OpenMP waits

from replicas import RawCopy, ReplicaStream, fetch_speed, run_replica, serve_raw, tokens

from headrace_worker.core.config import ReplicaConfig

PIECE_BYTES = 3 * 16 * 64 * 4  # the keys of a layer in a block of the embedded model
FETCHED = 1500  # tokens
PIECES = FETCHED // 16 * 2 * 30
PROMPTS = (256, 1500, 4000)
CACHE = 1 << 30
STREAMS, STREAM_TOKENS = 16, 4000  # they are cancelled when the long prompts are computed
BEFORE = 10  # tokens of each stream, before the long prompts arrive
LONG, LONG_PROMPTS = 6000, 2  # tokens of each


def config_of(name: str) -> ReplicaConfig:
    return ReplicaConfig(
        replica_id=name, model="smollm2", source="smollm2", dtype="float32", device="cpu",
        kv_cache_memory=CACHE, max_model_len=8192, max_num_seqs=32, cpu_threads=1,
    )  # fmt: skip


async def use_all_blocks(stream: ReplicaStream, random: Random) -> None:
    """Touches every page of the cache once, so that no first access is measured."""
    await stream.first_token(tokens(random, 16))
    await asyncio.sleep(0.6)  # an idle tick reports the free blocks
    for _ in range(stream.load.free_blocks * 16 // 256 + 1):
        await stream.first_token(tokens(random, 256))


async def gaps_under_prompts(replicas: list[ReplicaStream], source: str, random: Random) -> list[float]:
    """Times between tokens of streams on `replicas` while long prompts, all sent at once, are computed.

    The streams and the prompts are divided evenly among the replicas. source: the address of the replica that
    computes the prompts, empty = the one that answers.
    """
    turns = [replicas[index % len(replicas)] for index in range(STREAMS)]
    streams = [await replica.submit(tokens(random, 40), STREAM_TOKENS) for replica in turns]
    await asyncio.gather(*(stream.reach(BEFORE) for stream in streams))
    prompts = [await replica.submit(tokens(random, LONG), 1, source) for replica in turns[:LONG_PROMPTS]]
    await asyncio.gather(*(prompt.done.wait() for prompt in prompts))
    for replica, stream in zip(turns, streams, strict=True):
        await replica.cancel(stream)
    return [gap for stream in streams for gap in stream.gaps[BEFORE:]]


async def measure(addresses: list[str], raw_copy: RawCopy, rounds: int) -> dict[str, Any]:
    streams = [ReplicaStream(address) for address in addresses]
    for stream in streams:
        await stream.open()
    first, second = streams
    random = Random(1)
    await asyncio.gather(*(use_all_blocks(stream, random) for stream in streams))
    await fetch_speed(first, second, tokens(random, FETCHED))  # connects
    raw_copy.speed()
    fetched, raw = [], []
    for _ in range(rounds):
        raw.append(raw_copy.speed())
        fetched.append(await fetch_speed(first, second, tokens(random, FETCHED)))
    raw_copy.stop()  # its source polls, on a core that the replicas need
    print(f"blocks {statistics.median(fetched):.2f} GB/s, raw copy {statistics.median(raw):.2f} GB/s", flush=True)
    starts: dict[str, dict[str, float]] = {}
    for length in PROMPTS:
        local, remote = [], []
        for _ in range(rounds):
            local.append(await first.first_token(tokens(random, length)))
            remote.append(await first.first_token(tokens(random, length), second.address))
        starts[str(length)] = {
            "local_ms": round(statistics.median(local) * 1e3, 1),
            "prefill_replica_ms": round(statistics.median(remote) * 1e3, 1),
        }
        print(f"first token of {length} tokens: {starts[str(length)]}", flush=True)
    gaps = {
        "colocated": await gaps_under_prompts(streams, "", random),
        "disaggregated": await gaps_under_prompts([first], second.address, random),
    }
    between = {
        name: {
            "p50_ms": round(statistics.median(found) * 1e3, 1),
            "p99_ms": round(statistics.quantiles(found, n=100)[98] * 1e3, 1),
            "max_ms": round(max(found) * 1e3, 1),
        }
        for name, found in gaps.items()
    }
    for name, row in between.items():
        print(f"between tokens, {name}: {row}", flush=True)
    counters = first.load.counters
    for stream in streams:
        await stream.close()
    return {
        "blocks_gb_s": {"median": round(statistics.median(fetched), 3), "all": [round(x, 3) for x in fetched]},
        "raw_copy_gb_s": {"median": round(statistics.median(raw), 3), "all": [round(x, 3) for x in raw]},
        "first_token": starts,
        "between_tokens": between,
        "fetches": counters.fetches,
        "fetches_failed": counters.fetches_failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append to results/transfer.jsonl")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    children = []
    for name in ("decode", "prefill"):
        mine, theirs = context.Pipe()
        process = context.Process(target=run_replica, args=(config_of(name), theirs))
        process.start()
        children.append((process, mine))
    addresses = [pipe.recv() for _, pipe in children]
    mine, theirs = context.Pipe()
    source = context.Process(target=serve_raw, args=(PIECE_BYTES, PIECES, "cpu", theirs))
    source.start()
    result = asyncio.run(measure(addresses, RawCopy(PIECE_BYTES, PIECES, "cpu", mine), arguments.rounds))
    source.join(10)
    for process, pipe in children:
        pipe.send(True)
        process.join(20)
    if arguments.save:
        print(machine.save("transfer", result))


if __name__ == "__main__":
    main()
