"""Two replicas on one device: KV blocks from one to the other, and first tokens with a prefill replica.

Both processes share the GPU in turns, so that first tokens show that the path works, and not what two GPUs would reach.
The roofline of the blocks is a raw copy of equally large pieces from process to process by NIXL.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from random import Random
from statistics import median
from typing import Any, Literal

from gpu_bench.models import MODELS, write_config
from gpu_bench.section import Figure, Section, SectionRun

PIECES = 4000
ROUNDS, SMALL_ROUNDS = 5, 2


def run(run: SectionRun) -> Iterator[Figure]:
    from replicas import RawCopy, run_replica, serve_raw

    from headrace_worker.core.config import ReplicaConfig

    context = multiprocessing.get_context("spawn")
    children: list[tuple[Any, Connection]] = []

    def start(target: Any, *arguments: Any) -> Connection:
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()  # a child that ends early ends the wait for it
        children.append((process, mine))
        return mine

    source = str(write_config(run.model, run.folder))
    dtype_name: Literal["float32", "bfloat16"] = "float32" if run.device == "cpu" else "bfloat16"
    pipes = [
        start(run_replica, ReplicaConfig(
            replica_id=name, model=run.model, source=source, load_format="dummy", device=run.device,
            dtype=dtype_name, kv_cache_memory=(64 << 20) if run.small else (6 << 30),
            max_model_len=4096, max_num_seqs=32, cpu_threads=1 if run.small else 4,
        ))
        for name in ("decode", "prefill")
    ]  # fmt: skip
    addresses = [pipe.recv() for pipe in pipes]
    config = MODELS[run.model]
    element = 4 if dtype_name == "float32" else 2
    piece = config["num_key_value_heads"] * 16 * config.get("head_dim", 128) * element  # keys of a layer in a block
    sender = start(serve_raw, piece, PIECES, run.device)
    raw_copy = RawCopy(piece, PIECES, run.device, sender)
    lengths = (64, 512) if run.small else (512, 2048, 4000)
    rounds = SMALL_ROUNDS if run.small else ROUNDS

    yield from asyncio.run(measure(addresses, lengths, config["vocab_size"], rounds, raw_copy.speed))
    sender.send(True)
    for pipe in pipes:
        pipe.send(True)
    for process, _ in children:
        process.join(20)


async def measure(
    addresses: list[str], lengths: tuple[int, ...], vocabulary: int, rounds: int, raw_copy: Callable[[], float]
) -> list[Figure]:
    from replicas import ReplicaStream, fetch_speed, tokens

    first, second = streams = [ReplicaStream(address) for address in addresses]
    for stream in streams:
        await stream.open()
    random = Random(1)
    for _ in range(2):  # connects
        await fetch_speed(first, second, tokens(random, lengths[-1], vocabulary))
    figures = []
    fetched, copied = [], []
    for _ in range(rounds):
        copied.append(raw_copy())
        fetched.append(await fetch_speed(first, second, tokens(random, lengths[-1], vocabulary)))
    figures.append(Figure(f"blocks of {lengths[-1]} tokens", median(fetched), "GB/s", median(copied)))
    for length in lengths:
        local, remote = [], []
        for _ in range(rounds):
            local.append(await first.first_token(tokens(random, length, vocabulary)))
            remote.append(await first.first_token(tokens(random, length, vocabulary), second.address))
        figures.append(Figure(f"first token of {length} tokens, computed here", median(local) * 1e3, "ms"))
        figures.append(
            Figure(f"first token of {length} tokens, by a prefill replica on the same GPU", median(remote) * 1e3, "ms")
        )
    counters = first.load.counters
    figures.append(
        Figure.check("every fetch delivers", counters.fetches > 0 and not counters.fetches_failed,
                     fetches=counters.fetches, failed=counters.fetches_failed)
    )  # fmt: skip
    for stream in streams:
        await stream.close()
    return figures


SECTION = Section("transfer", "two replicas on one GPU: GB/s of KV blocks, first tokens", ("qwen3-0.6b",), 120, run)
