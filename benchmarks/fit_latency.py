"""Fits the simulator's latency model to a replica on this machine: a .json file for `headrace simulate --latency`.

    python benchmarks/fit_latency.py --out FILE [--model smollm2] [--threads N] [--rounds N]

A rank of its own runs random requests of mixed lengths, a few and many at a time, without a network. Every step's
tokens and seconds are kept, and least squares without negative coefficients gives the seconds of a step, of a prompt's
token, of a sequence, of a KV token that is read, and of a pair of a prompt's token and one that it attends to. The
first round is left out: it warms up. A transfer is assumed to take `--bandwidth` bytes per second.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import median

import machine
import numpy as np
from numpy.typing import NDArray

from headrace_cluster.simulator.latency_model import LatencyModel
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.latency import StepLatency
from headrace_worker.offline import OfflineEngine, Prompt

VOCABULARY = 40_000


class Recorder(StepLatency):
    """Keeps what it observes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[float, float, float, float, float, float]] = []
        self.pairs = 0.0

    def observe(self, prefill_tokens: int, decode_sequences: int, kv_tokens: int, seconds: float) -> None:
        super().observe(prefill_tokens, decode_sequences, kv_tokens, seconds)
        # A step that computes a prompt reads each of its tokens for half of the others, about.
        pairs = prefill_tokens * kv_tokens / (1 + decode_sequences) if prefill_tokens else 0.0
        self.rows.append((1.0, prefill_tokens, decode_sequences, kv_tokens, pairs / 2, seconds))


def fit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients, none below zero: those that would be are left out, the worst one first."""
    features, seconds = rows[:, :-1], rows[:, -1]
    weights = 1.0 / np.maximum(seconds, 1e-4)  # relative errors: short steps count as much as long ones
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept] * weights[:, None], seconds * weights, rcond=None)
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    result = np.zeros(features.shape[1])
    result[kept] = found
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--bandwidth", type=float, default=1e9)
    arguments = parser.parse_args()
    config = ReplicaConfig(
        replica_id="fit",
        model="fit",
        source=arguments.model,
        kv_cache_memory=512 << 20,
        max_model_len=2048,
        cpu_threads=arguments.threads,
        device="cpu",
    )
    engine = OfflineEngine(config)
    recorder = engine.assembly.engine.latency = Recorder()
    random = Random(1)
    for number in range(arguments.rounds + 1):
        if number == 1:
            recorder.rows.clear()
        for together in (1, 2, 4, 8):
            prompts = [
                Prompt([random.randrange(10, VOCABULARY) for _ in range(random.randint(16, 900))], 24, ignore_eos=True)
                for _ in range(together)
            ]
            engine.generate(prompts)
        print(f"round {number}: {len(recorder.rows)} steps", flush=True)
    rows = np.array(recorder.rows)
    found = fit(rows)
    errors = np.abs(rows[:, :-1] @ found - rows[:, -1]) / rows[:, -1]
    facts = machine.describe()
    model = LatencyModel(
        name=f"{arguments.model} on this machine",
        source=f"fitted to {len(rows)} steps on {facts['processor']}, {arguments.threads} threads, with a median error "
        f"of {np.median(errors):.0%}",
        base=float(found[0]),
        per_prefill_token=float(found[1]),
        per_decode_sequence=float(found[2]),
        per_kv_token=float(found[3]),
        per_prefill_pair=float(found[4]),
        kv_bytes=kv_bytes(engine),
        transfer_bandwidth=arguments.bandwidth,
        max_num_seqs=engine.assembly.engine.scheduler.limits.max_num_seqs,
        max_num_batched_tokens=engine.assembly.engine.scheduler.limits.max_num_batched_tokens,
    )
    arguments.out.write_text(json.dumps(asdict(model), indent=2) + "\n")
    print(f"{model.source}, p90 {np.quantile(errors, 0.9):.0%}; a median step took {median(rows[:, -1]) * 1e3:.1f} ms")


def kv_bytes(engine: OfflineEngine) -> int:
    """Of a token in the KV cache: keys and values of every layer."""
    layout = engine.assembly.runner.layout
    return layout.block_bytes // layout.block_size


if __name__ == "__main__":
    main()
