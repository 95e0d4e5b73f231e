"""The engine and its kernels on one GPU, in one go: no Ray, no gRPC, no network, random weights.

    python benchmarks/gpu.py [--sections kernels,tokens,...] [--models qwen3-0.6b,llama-8b] [--save]

kernels   every op against its reference, compiled (tests/kernels)         tokens   against plain transformers, float32
decode    tok/s and GB/s of the weights and KV read, batch 1, 32, 256      workload 256 requests, in and out 100-1024
long      1k in, 1k out                                                    modes    graphs, asynchronous, deterministic
Each model is loaded in a process of its own. `--device cpu --models tiny --small` tries the script itself anywhere.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import machine
from gpu_models import write_config

SECTIONS = ("kernels", "tokens", "decode", "workload", "long", "modes")
PEAK_GB_S = 4300.0  # of an H200, measured with copies
Result = dict[str, Any]


class Bench:
    """One engine over random weights."""

    def __init__(self, model: str, folder: Path, device: str, **options: Any) -> None:
        from headrace_worker.config import ReplicaConfig
        from headrace_worker.offline import OfflineEngine

        fields: dict[str, Any] = {
            "dtype": "bfloat16" if device == "cuda" else "float32",
            "max_model_len": 4096,
            "max_num_seqs": 256,
        }
        source = str(write_config(model, folder))
        self.config = ReplicaConfig(
            replica_id="bench", model=model, source=source, secret=b"", device=device, load_format="dummy",
            **fields | options,
        )  # fmt: skip
        began = time.perf_counter()
        self.engine = OfflineEngine(self.config)
        self.seconds_to_ready = time.perf_counter() - began
        self.vocab = self.engine.assembly.model.vocab_size
        self.random = Random(0)

    def prompts(self, lengths: list[tuple[int, int]]) -> list[Any]:
        """Requests of (input, output) tokens that never stop early."""
        from headrace_worker.offline import Prompt

        ids = [[self.random.randrange(10, self.vocab) for _ in range(length)] for length, _ in lengths]
        return [Prompt(one, out, ignore_eos=True) for one, (_, out) in zip(ids, lengths, strict=True)]

    def run(self, lengths: list[tuple[int, int]]) -> Result:
        """Everything at once, to the end."""
        with self.host_times() as host, self.step_memory() as memory:
            began = time.perf_counter()
            done = self.engine.generate(self.prompts(lengths))
            seconds = time.perf_counter() - began
        assert all(len(completion.token_ids) == out for completion, (_, out) in zip(done, lengths, strict=True))
        output = sum(out for _, out in lengths)
        return {
            "requests": len(lengths),
            "output_tok_s": round(output / seconds, 1),
            "total_tok_s": round((output + sum(length for length, _ in lengths)) / seconds, 1),
            "seconds": round(seconds, 2),
            **host,
            **memory,
        }

    def decode(self, batch: int, context: int, steps: int) -> Result:
        """Steady decoding: the time of steps once every prompt is computed."""
        times: list[float] = []
        last = [0.0]

        def after() -> None:
            now = time.perf_counter()
            running = self.engine.assembly.engine.scheduler.running
            if len(running) == batch and all(request.computed > context for request in running):
                times.append(now - last[0])
            last[0] = now

        self.engine.generate(self.prompts([(context, steps)] * batch), after_step=after)
        step = median(times[3:-3] or times)
        assembly = self.engine.assembly
        kv = batch * (context + steps / 2) * assembly.model.layout.block_bytes / assembly.model.layout.block_size
        read = assembly.model.weight_bytes + kv * len(assembly.model.layout.groups)
        return {
            "step_ms": round(step * 1e3, 3),
            "output_tok_s": round(batch / step, 1),
            "gb_s": round(read / step / 1e9, 1),
            "of_peak": round(read / step / 1e9 / PEAK_GB_S, 3),
        }

    @contextmanager
    def step_memory(self) -> Iterator[Result]:
        """GiB that steps take beside weights and cache while in the block, and what is left for them; GPUs only."""
        import torch

        from headrace_worker.runner.activations import step_bytes

        found: Result = {}
        model = self.engine.assembly.model
        if model.device.type != "cuda":
            yield found
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        left = step_bytes(
            model.config,
            tokens=self.engine.assembly.limits.max_num_batched_tokens,
            rows=self.engine.assembly.limits.max_num_seqs,
            vocab_size=model.vocab_size,
            element_bytes=model.dtype.itemsize,
        )
        found["step_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        found["step_gib_left"] = round(left / 2**30, 3)

    @contextmanager
    def host_times(self) -> Iterator[Result]:
        """Microseconds per step that the host spends outside of waiting for results, while in the block."""
        engine: Any = self.engine.assembly.engine
        runner = engine._runner
        waits: list[float] = []
        steps: list[float] = []
        collect, step = runner.collect, engine.step

        def timed_collect(handle: Any) -> Any:
            began = time.perf_counter()
            try:
                return collect(handle)
            finally:
                waits.append(time.perf_counter() - began)

        def timed_step() -> Any:
            began, count = time.perf_counter(), len(waits)
            outputs = step()
            steps.append(time.perf_counter() - began - sum(waits[count:]))
            return outputs

        runner.collect, engine.step = timed_collect, timed_step
        found: Result = {}
        try:
            yield found
        finally:
            runner.collect, engine.step = collect, step
            ordered = sorted(steps) or [0.0]
            found["host_us_p50"] = round(median(ordered) * 1e6, 1)
            found["host_us_p99"] = round(ordered[int(len(ordered) * 0.99)] * 1e6, 1)
            found["steps"] = len(steps)


def kernels(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """The kernel tests, which run compiled where there is a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parents[1] / "tests" / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
    return {"passed": done.returncode == 0, "summary": last}


def tokens(bench: Callable[..., Bench], arguments: argparse.Namespace) -> Result:
    """Greedy tokens in float32, many at once, against plain transformers, teacher-forced; ties are counted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace_worker.model.load import load
    from headrace_worker.model.surgery import SurgeryPlan

    made = bench(dtype="float32", kv_cache_memory=2 << 30 if arguments.device == "cuda" else 64 << 20)
    model = made.engine.assembly.model
    prompts = made.prompts([(length, 24) for length in (1, 5, 16, 17, 63, 200, 400, 700)])
    done = made.engine.generate(prompts)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.source.path), dtype=torch.float32)
    plain = plain.to(model.device).eval()
    plain.load_state_dict(load(made.config, plan=SurgeryPlan.none()).module.state_dict(), strict=False)
    plain.tie_weights()
    wrong = ties = 0
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=model.device)
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
    """What graphs and planning ahead bring, what determinism costs, and whether its rows are their own."""
    context, steps = (32, 24) if arguments.small else (512, 128)
    ways: dict[str, dict[str, Any]] = {
        "graphs, ahead": {},
        "no graphs": {"cuda_graphs": "off"},
        "one at a time": {"async_scheduling": "off"},
        "no graphs, one at a time": {"cuda_graphs": "off", "async_scheduling": "off"},
        "deterministic": {"deterministic": True},
    }
    found: Result = {}
    for name, options in ways.items():
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
    """In a process of its own: what one section leaves on the device is gone with it."""
    try:
        with tempfile.TemporaryDirectory() as folder:

            def bench(**options: Any) -> Bench:
                return Bench(model, Path(folder), arguments.device, **options)

            answer.send(RUN[section](bench, arguments))
    except Exception as error:
        answer.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})


def device_facts() -> Result:
    """What the figures were measured on."""
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
    parser.add_argument("--small", action="store_true", help="a few short requests: to try the script")
    parser.add_argument("--save", action="store_true", help="write results/gpu.json")
    arguments = parser.parse_args()
    facts = device_facts()
    if arguments.device == "cuda" and facts["gpu"] is None:
        sys.exit("There is no GPU here; --device cpu --models tiny --small tries the script.")
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
                found = {"error": "the process ended without a word"}
            process.join()
            results.setdefault(section, {})[model] = found
            print(f"{section} {model} ({time.perf_counter() - began:.0f} s): {json.dumps(found)}", flush=True)
            if arguments.save:  # after each: a run that is cut short has told what it knew
                machine.save("gpu", {"device": facts, "results": results})


if __name__ == "__main__":
    main()
