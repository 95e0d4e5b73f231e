"""The engine alone on CPUs beside its peers: the same weights and prompts, in turn, in one command.

    python benchmarks/offline.py [--rounds 5] [--forms q4_1,q8_0,f32,bf16] [--save]
        [--workloads single,prefill,batch] [--only REGEX]     REGEX: of contenders
        [--served]                            also the same over HTTP: a `serve` for each form and arithmetic
        [--llama PYTHON] [--vllm PYTHON]      interpreters of environments with llama-cpp-python and vLLM: see peers/

Workloads (random prompts, greedy, end-of-sequence ignored; prompts are new in every round, so nothing is cached):
    single    1 request of 8 tokens in, 128 out: output tokens per second
    prefill   1 request of 512 in, 1 out: input tokens per second
    batch    32 requests of 128 in, 64 out: output tokens per second
    eight     8 requests of 32 in, 64 out: output tokens per second

Forms of the embedded model: the GGUF as it is (q4_1), the same values as Q8_0 and F32 files, and in bfloat16. Headrace
runs in exact and in bf16 arithmetic, once layer by layer (`unfused`), and once with torch's linears (`unpacked`);
`transformers` is plain `generate`, beside F32. A round before the first one warms up. The forms `gdn` and `mla` are
other models with random weights: 0.4 GB with Gated DeltaNet in 6 of its 8 layers, as in Qwen3.5; DeepSeek-V3 at 1/64 of
its width (hidden, inner sizes and number of heads), its latents, 256 experts and 61 layers as they are.

`served` is the engine behind a router that streams to this process, on the same processors; its speed is printed as a
part of the engine's in this process.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal

import gguf
import machine
import serving
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.model.load import load
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import OfflineEngine, Prompt

VOCABULARY = 49_000
PEERS = Path(__file__).parent / "peers"
WORKLOADS = {
    "single": (1, 8, 128),
    "prefill": (1, 512, 1),
    "batch": (32, 128, 64),
    "eight": (8, 32, 64),
}  # requests, in, out
RANDOM: dict[str, dict[str, Any]] = {
    "gdn": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "mla": {
        "model_type": "deepseek_v3", "hidden_size": 112, "intermediate_size": 288, "moe_intermediate_size": 32,
        "num_hidden_layers": 61, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24,
    },
}  # fmt: skip
KINDS = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "f32": gguf.GGMLQuantizationType.F32}

Run = Callable[[Sequence[list[int]], Sequence[int]], float]
"""(prompts, tokens to generate of each) -> seconds."""


def tokens_of(workload: str) -> int:
    """What its speed counts."""
    requests, length, output = WORKLOADS[workload]
    return requests * (length if workload == "prefill" else output)


def rewrite(source: Path, kind: gguf.GGMLQuantizationType, to: Path) -> Path:
    """A GGUF file with the values of another one, its matrices in another form."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 2 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def plain_model(source: str, dtype: torch.dtype = torch.float32, save: Path | None = None) -> Any:
    """The same weights in an untouched transformers model. save: a folder that gets it, with its tokenizer."""
    config = ReplicaConfig(replica_id="peer", model="peer", source=source, dtype="float32")
    loaded = load(config, plan=SurgeryPlan.none())
    loaded.config.use_cache = True  # Headrace keeps its own cache and switches this one off
    model = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict(loaded.module.state_dict(), strict=False)
    model.tie_weights()
    model = model.eval().to(dtype)
    if save is not None:
        model.save_pretrained(save)
        (save / "tokenizer.json").write_bytes(loaded.facts.tokenizer_json)
    return model


def random_model(folder: Path, fields: dict[str, Any]) -> Any:
    """Saves a random model in bfloat16; returns it in float32."""
    config = AutoConfig.for_model(**fields, vocab_size=49_152, tie_word_embeddings=True, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    source = ReplicaConfig(replica_id="peer", model="peer", source="smollm2")
    (folder / "tokenizer.json").write_bytes(load(source).facts.tokenizer_json)
    return model.float().eval()


def headrace(source: str, arithmetic: Literal["exact", "bf16"] = "exact", plan: SurgeryPlan | None = None) -> Run:
    """An engine in this process."""
    config = ReplicaConfig(
        replica_id="bench", model="bench", source=source, dtype="float32", kv_cache_memory=1 << 30, max_model_len=2048,
        cpu_arithmetic=arithmetic,
    )  # fmt: skip
    engine = OfflineEngine(config, load(config, plan=plan))
    greedy, threads = RowSampling(temperature=0.0), torch.get_num_threads()

    def run(prompts: Sequence[list[int]], tokens: Sequence[int]) -> float:
        torch.set_num_threads(threads)  # other contenders have theirs
        began = time.perf_counter()
        work = zip(prompts, tokens, strict=True)
        done = engine.generate([Prompt(prompt, count, greedy, ignore_eos=True) for prompt, count in work])
        seconds = time.perf_counter() - began
        assert [len(completion.token_ids) for completion in done] == list(tokens)
        return seconds

    return run


def served(stack: ExitStack, source: str, arithmetic: Literal["exact", "bf16"] = "exact") -> Run:
    """A server of its own, and one client that streams all prompts at the same time."""
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--cpu-arithmetic", arithmetic)
    url = stack.enter_context(serving.own_server(source, *flags))
    model = asyncio.run(serving.first_model(url))

    def run(prompts: Sequence[list[int]], tokens: Sequence[int]) -> float:
        return asyncio.run(serving.drive(url, model, list(zip(prompts, tokens, strict=True)), len(prompts)))[1]

    return run


def transformers(model: Any) -> Run:
    """Static batching, `generate`: as long as the longest answer."""

    def run(prompts: Sequence[list[int]], tokens: Sequence[int]) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(tokens), min_new_tokens=max(tokens),
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - began

    return run


@contextmanager
def peer(*command: str) -> Iterator[Run]:
    """A peer's processes, see peers/. They are stopped while others are measured: their idle threads wake up."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        if not any(line == "ready\n" for line in stdout):  # a library may print, too
            raise SystemExit(f"{command[1]} ended: see its messages above")
        os.killpg(process.pid, signal.SIGSTOP)

        def run(prompts: Sequence[list[int]], tokens: Sequence[int]) -> float:
            os.killpg(process.pid, signal.SIGCONT)
            stdin.write(json.dumps({"prompts": prompts, "tokens": max(tokens)}) + "\n")
            stdin.flush()
            for line in stdout:
                if line.startswith('{"seconds"'):
                    os.killpg(process.pid, signal.SIGSTOP)
                    return float(json.loads(line)["seconds"])
            raise RuntimeError(f"{command[1]} ended: see its messages above")

        try:
            yield run
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            stdin.close()


def contenders(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Run]:
    """By name, with the form of the weights."""
    original = resolve("smollm2", "auto", None).path
    forms, threads = arguments.forms.split(","), str(torch.get_num_threads())
    makers: dict[str, Callable[[], Run]] = {}
    for form in (form for form in forms if form in {*KINDS, "q4_1"}):
        file = rewrite(original, KINDS[form], folder / f"{form}.gguf") if form in KINDS else original
        makers[f"headrace {form}"] = partial(headrace, str(file))
        if arguments.llama:
            command = (arguments.llama, str(PEERS / "llama_cpp.py"), str(file), threads)
            makers[f"llama.cpp {form}"] = partial(stack.enter_context, peer(*command))
    if "q4_1" in forms:
        makers["headrace q4_1 bf16 arithmetic"] = lambda: headrace("smollm2", "bf16")
        if arguments.served:
            makers["served q4_1"] = lambda: served(stack, "smollm2")
            makers["served q4_1 bf16 arithmetic"] = lambda: served(stack, "smollm2", "bf16")
        makers["headrace q4_1 unfused"] = lambda: headrace("smollm2", plan=SurgeryPlan(native=False))
        makers["headrace q4_1 unpacked"] = lambda: headrace("smollm2", plan=SurgeryPlan(linears=False, native=False))
    if "f32" in forms:
        makers["transformers f32"] = lambda: transformers(plain_model("smollm2"))
    for form in (form for form in forms if form in RANDOM):
        plain = random_model(folder / form, RANDOM[form])
        makers[f"headrace {form}"] = partial(headrace, str(folder / form))
        makers[f"headrace {form} bf16 arithmetic"] = partial(headrace, str(folder / form), "bf16")
        makers[f"transformers {form}"] = partial(transformers, plain)
    for form, dtype in {"f32": torch.float32, "bf16": torch.bfloat16}.items():
        if form in forms and (arguments.vllm or form == "bf16"):
            plain_model("smollm2", dtype, folder / form)
            if form == "bf16":
                makers["headrace bf16"] = partial(headrace, str(folder / form))
                makers["headrace bf16 bf16 arithmetic"] = partial(headrace, str(folder / form), "bf16")
                if arguments.served:
                    makers["served bf16 bf16 arithmetic"] = lambda: served(stack, str(folder / "bf16"), "bf16")
            if arguments.vllm:
                command = (arguments.vllm, str(PEERS / "vllm_cpu.py"), str(folder / form), threads)
                kind = str(dtype).removeprefix("torch.")
                makers[f"vllm {form}"] = partial(stack.enter_context, peer(*command, kind))
    return {name: make() for name, make in makers.items() if re.search(arguments.only, name)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--forms", default="q4_1,q8_0,f32,bf16")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--only", default="", metavar="REGEX", help="names of contenders")
    parser.add_argument("--served", action="store_true", help="also over HTTP")
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--save", action="store_true", help="append to results/offline.jsonl")
    arguments = parser.parse_args()
    for name, known in (("forms", {"q4_1", "bf16", *RANDOM, *KINDS}), ("workloads", {*WORKLOADS})):
        if unknown := set(getattr(arguments, name).split(",")) - known:
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(sorted(known))}")
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        runs = contenders(arguments, Path(folder), stack)
        random = Random(0)
        for number in range(arguments.rounds + 1):  # the first one warms up
            for workload in arguments.workloads.split(","):
                requests, length, output = WORKLOADS[workload]
                for name, run in runs.items():
                    if name.startswith("llama.cpp") and requests > 1:
                        continue
                    prompts = [[random.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(requests)]
                    speed = tokens_of(workload) / run(prompts, [output] * requests)
                    if number:
                        speeds.setdefault(f"{workload}/{name}", []).append(speed)
                    print(f"round {number} {workload:8s} {name:32s} {speed:8.1f} tok/s", flush=True)
    medians = {name: round(median(values), 1) for name, values in speeds.items()}
    for name, value in medians.items():
        workload, _, contender = name.partition("/")
        base = next((f"headrace {form}" for form in RANDOM if f" {form}" in contender), "headrace q4_1")
        base = contender.replace("served", "headrace") if contender.startswith("served") else base
        engine = medians.get(f"{workload}/{base}")
        print(f"{name:42s} {value:8.1f} tok/s" + (f"  {value / engine:5.2f} of {base}" if engine else ""))
    if arguments.save:
        all_of = {name: [round(value, 1) for value in values] for name, values in speeds.items()}
        print(machine.save("offline", {"tok_s": medians, "all": all_of, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
