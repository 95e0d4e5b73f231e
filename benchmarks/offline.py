"""Offline throughput of the engine against transformers, same weights, same prompts, interleaved in one run.

    python benchmarks/offline.py [--rounds 3] [--peers generate,generate_batch] [--save]

Workloads (random prompts, greedy, fp32, end-of-sequence ignored):
    single   1 request of 128 tokens in, 64 out
    equal   32 requests of 128 in, 64 out
    mixed   32 requests of 128 in, 8 to 256 out: a static batch runs until its longest request ends

Prefix caching has no effect: prompts are random and new in every round.
"""

import argparse
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

import machine
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.load import load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import OfflineEngine, Prompt

VOCABULARY = 49_000
Workload = list[tuple[list[int], int]]


def workload(name: str, seed: int) -> Workload:
    """(prompt, tokens to generate) per request."""
    random = Random(seed)
    count = 1 if name == "single" else 32
    lengths = [64] * count if name != "mixed" else [random.randrange(8, 257) for _ in range(count - 1)] + [256]
    return [([random.randrange(10, VOCABULARY) for _ in range(128)], length) for length in lengths]


def plain_model(source: str) -> Any:
    """The same weights in an untouched transformers model."""
    config = ReplicaConfig(replica_id="peer", model="peer", source=source, dtype="float32")
    loaded = load(config, plan=SurgeryPlan.none())
    loaded.config.use_cache = True  # Headrace keeps its own cache and switches this one off
    model = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict(loaded.module.state_dict(), strict=False)
    model.tie_weights()
    return model.eval()


def run_headrace(engine: OfflineEngine, work: Workload) -> int:
    done = engine.generate([Prompt(prompt, length, ignore_eos=True) for prompt, length in work])
    return sum(len(completion.token_ids) for completion in done)


def run_generate(model: Any, work: Workload) -> int:
    """Static batching: all requests wait for the longest one; only the requested tokens count."""
    longest = max(length for _, length in work)
    ids = torch.tensor([prompt for prompt, _ in work])
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
    return sum(length for _, length in work)


def run_generate_batch(model: Any, work: Workload) -> int:
    """transformers' continuous batching, which has one length for all requests."""
    longest = max(length for _, length in work)
    settings = GenerationConfig(max_new_tokens=longest, eos_token_id=-1, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("paged|sdpa")
    try:  # not in inference mode: it changes its own tensors in place
        outputs = model.generate_batch(
            inputs=[prompt for prompt, _ in work], generation_config=settings, progress_bar=False
        )
    finally:
        model.set_attn_implementation("sdpa")
    made = sum(len(output.generated_tokens) for output in outputs.values())
    if made < longest * len(work):
        raise RuntimeError(f"generate_batch made {made} of {longest * len(work)} tokens")
    return sum(length for _, length in work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="generate,generate_batch", help="comma-separated; may be empty")
    parser.add_argument("--workloads", default="single,equal,mixed")
    parser.add_argument("--save", action="store_true", help="append to results/offline.jsonl")
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.peers.split(",") if peer]
    names = arguments.workloads.split(",")

    config = ReplicaConfig(
        replica_id="bench", model="bench", source=arguments.source, dtype="float32", kv_cache_memory=2 << 30
    )
    engine = OfflineEngine(config)
    torch.set_num_threads(engine.assembly.model.threads)
    model = plain_model(arguments.source) if peers else None
    contenders: dict[str, Callable[[Workload], int]] = {"headrace": lambda work: run_headrace(engine, work)}
    if "generate" in peers:
        contenders["generate"] = lambda work: run_generate(model, work)
    if "generate_batch" in peers:
        contenders["generate_batch"] = lambda work: run_generate_batch(model, work)

    speeds: dict[str, dict[str, list[float]]] = {name: {peer: [] for peer in contenders} for name in names}
    for round_number in range(arguments.rounds):
        for name in names:
            for peer, run in contenders.items():
                if peer == "generate_batch" and name != "equal":
                    continue
                work = workload(name, seed=round_number)
                began = time.perf_counter()
                tokens = run(work)
                seconds = time.perf_counter() - began
                speeds[name][peer].append(tokens / seconds)
                print(f"round {round_number} {name:7s} {peer:15s} {tokens / seconds:8.1f} output tok/s", flush=True)

    summary: dict[str, Any] = {}
    for name in names:
        for peer, values in speeds[name].items():
            if not values:
                continue
            own = median(speeds[name]["headrace"])
            summary[f"{name}/{peer}"] = {
                "median_tok_s": round(median(values), 1),
                "all": [round(value, 1) for value in values],
                "headrace_ratio": round(own / median(values), 2),
            }
            print(f"{name:7s} {peer:15s} median {median(values):8.1f} tok/s   headrace is {own / median(values):.2f}x")
    if arguments.save:
        print(machine.save("offline", {"output_tok_s": summary, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
