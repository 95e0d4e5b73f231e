"""The engine and its kernels on one GPU, in one run: no Ray, no gRPC, no network, random weights.

    python benchmarks/gpu.py [--sections kernels,tokens,...] [--models qwen3-0.6b,llama-8b] [--save]

kernels   every op against its reference, compiled (tests/kernels)         tokens   against plain transformers, float32
decode    tok/s and GB/s of the weights and KV read, batch 1, 32, 256      workload 256 requests, in and out 100-1024
long      1k in, 1k out                                                    modes    graphs, asynchronous, deterministic
Each model is loaded in a separate process. `--device cpu --models tiny --small` tests the script itself on any machine.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import machine
from gpu_bench import Bench, Result

SECTIONS = ("kernels", "tokens", "decode", "workload", "long", "modes")


def kernels(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """The kernel tests, which run compiled on a machine with a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parents[1] / "tests" / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
    return {"passed": done.returncode == 0, "summary": last}


def tokens(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """Greedy tokens in float32, many requests at once, against plain transformers, teacher-forced; counts ties."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace_worker.model.load import load
    from headrace_worker.model.surgery import SurgeryPlan

    made = bench(dtype="float32", kv_cache_memory=2 << 30 if arguments.device == "cuda" else 64 << 20)
    model = made.engine.assembly.model
    prompts = made.prompts([(length, 24) for length in (1, 5, 16, 17, 63, 200, 400, 700)])
    done = made.engine.generate(prompts)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.source.path), dtype=torch.float32)
    plain = plain.to(model.device.torch_device).eval()
    plain.load_state_dict(load(made.config, plan=SurgeryPlan.none()).module.state_dict(), strict=False)
    plain.tie_weights()
    wrong = ties = 0
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=model.device.torch_device)
        with torch.inference_mode():
            logits = plain(ids, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1].float()
        for row, token in enumerate(completion.token_ids):
            best = int(logits[row].argmax())
            gap = float(logits[row, best] - logits[row, token])
            ties += token != best and gap < 1e-3
            wrong += token != best and gap >= 1e-3
    return {"positions": sum(len(completion.token_ids) for completion in done), "wrong": wrong, "ties": ties}


def decode(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """Batch 1, 32, 256 at 512 tokens of context."""
    made = bench()
    context, steps = (32, 24) if arguments.small else (512, 128)
    return {f"batch {batch}": made.decode(batch, context, steps) for batch in (1, 32, 256)}


def workload(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """256 requests, input and output uniform in 100-1024: the benchmark of nano-vllm (its README)."""
    made, random = bench(), Random(0)
    count, most = (16, 60) if arguments.small else (256, 1024)
    least = 10 if arguments.small else 100
    lengths = [(random.randint(least, most), random.randint(least, most)) for _ in range(count)]
    made.run(lengths[:8])
    return made.run(lengths)


def long(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """1k in, 1k out, 256 at a time."""
    made = bench()
    count, length = (4, 64) if arguments.small else (256, 1024)
    return made.run([(length, length)] * count)


def modes(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """The gain of graphs and asynchronous scheduling, the cost of determinism; whether a row depends on its batch."""
    context, steps = (32, 24) if arguments.small else (512, 128)
    variants: dict[str, dict[str, Any]] = {
        "graphs, ahead": {},
        "no graphs": {"cuda_graphs": "off"},
        "one at a time": {"async_scheduling": "off"},
        "no graphs, one at a time": {"cuda_graphs": "off", "async_scheduling": "off"},
        "deterministic": {"deterministic": True},
    }
    found: Result = {}
    for name, options in variants.items():
        made = bench(**options)
        found[name] = {f"batch {batch}": made.decode(batch, context, steps) for batch in (1, 32)}
        prompts = made.prompts([(length, 16) for length in range(5, 85, 5)])
        together = [completion.token_ids for completion in made.engine.generate(prompts)]
        alone = [made.engine.generate([prompt])[0].token_ids for prompt in prompts]
        found[name]["alone_equals_together"] = sum(one == other for one, other in zip(alone, together, strict=True))
        found[name]["of"] = len(prompts)
        _free(made)
    return found


def _free(made: Bench) -> None:
    import gc

    import torch

    made.engine = None  # type: ignore[assignment]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


RUN: dict[str, Callable[..., Result]] = {
    "kernels": kernels,
    "tokens": tokens,
    "decode": decode,
    "workload": workload,
    "long": long,
    "modes": modes,
}


def run_section(section: str, model: str, arguments: argparse.Namespace, answer: Any) -> None:
    """Runs in a separate process, so that its end frees everything on the device."""
    try:
        with tempfile.TemporaryDirectory() as folder:

            def bench(**options: Any) -> Bench:
                return Bench(model, Path(folder), arguments.device, **options)

            answer.send(RUN[section](bench, arguments))
    except Exception as error:
        answer.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def device_facts() -> Result:
    """The device that the figures were measured on."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None}
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "memory_gib": round(memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default="qwen3-0.6b,llama-8b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a few short requests: to test the script")
    parser.add_argument("--save", action="store_true", help="append to results/gpu.jsonl")
    arguments = parser.parse_args()
    facts = device_facts()
    if arguments.device == "cuda" and facts["gpu"] is None:
        sys.exit("There is no GPU here; --device cpu --models tiny --small tests the script.")
    context = multiprocessing.get_context("spawn")
    results: Result = {}
    for section in arguments.sections.split(","):
        if section not in RUN:
            sys.exit(f"There is no section '{section}': choose from {', '.join(SECTIONS)}.")
        for model in ["-"] if section == "kernels" else arguments.models.split(","):
            began = time.perf_counter()
            ours, theirs = context.Pipe()
            process = context.Process(target=run_section, args=(section, model, arguments, theirs))
            process.start()
            theirs.close()
            try:
                found = ours.recv()
            except EOFError:
                found = {"error": "the process ended without a result"}
            process.join()
            results.setdefault(section, {})[model] = found
            print(f"{section} {model} ({time.perf_counter() - began:.0f} s): {json.dumps(found)}", flush=True)
            if arguments.save:  # after each: an aborted run has saved its results so far
                machine.save("gpu", {"device": facts, "results": results})


if __name__ == "__main__":
    main()
