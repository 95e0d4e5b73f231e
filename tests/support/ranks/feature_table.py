"""Writes docs/features.md from the reports of the tests that ran.

pytest tests/worker/parallel --junitxml=one.xml; pytest tests/worker/parallel --faults ranks --junitxml=two.xml
python tests/support/ranks/feature_table.py one.xml two.xml
"""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

TARGET = Path(__file__).parents[3] / "docs" / "features.md"
KINDS = {
    "llama": "GQA, tied embedding",
    "llama-bias": "biases everywhere",
    "qwen2": "q/k/v biases",
    "qwen3": "norms on q and k",
    "mistral": "sliding window",
    "gemma2": "sliding and full layers, soft caps",
    "gemma3_text": "sliding and full layers, norms on q and k",
    "granite": "scaled residuals and logits",
    "phi3": "packed q/k/v and gate/up",
    "gpt_neox": "packed heads, parallel residual, MHA",
    "glm4": "packed gate/up, partial rotary",
    "cohere2": "sliding and full layers, parallel residual",
    "gpt_oss": "sinks, sliding and full layers, MoE",
    "mixtral": "MoE",
    "qwen3_moe": "MoE, norms on q and k",
    "gemma3n_text": "layers that share keys and values, activations that depend on each other",
    "deepseek_v3": "latent attention, MoE in groups",
    "deepseek_v2": "latent attention, MoE",
    "glm4_moe_lite": "latent attention, MoE",
    "minicpm3": "latent attention, scaled residuals",
    "youtu": "latent attention",
    "axk1": "latent attention, MoE",
    "deepseek_v32": "latent attention to what an indexer selects",
    "glm_moe_dsa": "latent attention to what an indexer selects, for several layers",
    "axk2": "latent attention to what an indexer selects",
    "hy_v4": "latent attention with sinks and gates, to what an indexer selects",
    "llama4_text": "attention within one chunk, layers without rotary embeddings, MoE",
    "gemma4_text": "layers of two sizes with and without a window",
    "gemma4_text-shared": "the same, layers that share keys and values",
    "gemma4_text-equal": "the same, values made by the keys' projection",
    "mimo_v2_flash": "keys larger than values, sinks, KV heads per layer, MoE",
    "kimi_linear": "Kimi Delta Attention beside latent attention, MoE",
    "qwen3_next": "Gated DeltaNet beside gated attention, MoE",
    "qwen3_5_text": "Gated DeltaNet beside gated attention",
    "qwen3_5_moe_text": "Gated DeltaNet beside gated attention, MoE",
    "olmo_hybrid": "Gated DeltaNet beside attention",
    "lara_mini": "Gated DeltaNet beside sliding and full layers, MoE",
    "bamba": "Mamba-2 beside attention",
    "granitemoehybrid": "Mamba-2 beside attention, scaled residuals and logits",
    "nemotron_h": "Mamba-2, attention and MLP in layers of their own",
    "falcon_h1": "Mamba-2 and attention in the same layer",
    "jamba": "Mamba-1 beside attention",
    "lfm2": "short convolutions beside attention",
    "lfm2_moe": "short convolutions beside attention, MoE",
    "lfm3": "short convolutions beside sliding and full layers",
    "qwen3_5": "a checkpoint with images",
    "minicpmv4_6": "a checkpoint with images",
    "gemma3": "a checkpoint with images",
    "mistral3": "a checkpoint with images",
    "internvl": "a checkpoint with images",
    "llava_next": "a checkpoint with images",
    "gemma4": "a checkpoint with images",
    "kimi_k25": "a checkpoint with images",
    "SmolLM2-135M": "the real model: 9 heads, 3 KV heads",
}
ONE_RANK = re.compile(r"test_tokens_of_one_rank\[(?P<family>[\w-]+)\]")
ORACLE = re.compile(r"test_tokens_between_processes\[(?P<family>[\w-]+)-(?P<tp>\d)-(?P<pp>\d)\]")
EXPERTS = re.compile(r"test_whole_experts_per_process\[(?P<family>[\w-]+)-(?P<tp>\d)-(?P<pp>\d)\]")
REAL = re.compile(r"test_the_real_model_between_processes\[(?P<tp>\d)-(?P<pp>\d)\]")
CACHED = re.compile(
    r"test_tokens_after_preemption_and_from_a_cached_prefix\[(?P<family>[\w-]+?)-(?P<tp>\d)-(?P<pp>\d).*\]"
)
BOUNDED = re.compile(r"test_a_window_bounds_the_cache\[(?P<tp>\d)-(?P<pp>\d)\]")

FORMAT = re.compile(r"test_tokens\[(?P<family>\w+)-(?P<format>[\w-]+?)-(?P<tp>\d)-(?P<pp>\d)-(?P<ep>True|False)\]")
FORMATS = {
    "fp8-block": "FP8, a scale for each block",
    "fp8-tensor": "FP8, one scale",
    "fbgemm": "FP8, a scale for each output (fbgemm_fp8)",
    "modelopt": "FP8, one scale (modelopt)",
    "compressed-tensors": "FP8, a scale for each output (compressed-tensors)",
    "awq": "AWQ",
    "gptq": "GPTQ, 4 bits",
    "gptq-8": "GPTQ, 8 bits",
    "gptq-v2": "GPTQ, 4 bits, zeros as stored (v2)",
    "gptq-act-order": "GPTQ, 4 bits, act-order",
    "int4": "int4 (compressed-tensors)",
    "int4-zero": "int4 with zeros (compressed-tensors)",
    "int8-w8a8": "int8 W8A8, inputs not rounded (compressed-tensors)",
    "mxfp4": "MXFP4 (compressed-tensors)",
    "nvfp4": "NVFP4 (compressed-tensors)",
    "modelopt-nvfp4": "NVFP4 (modelopt)",
    "mxfp4-experts": "MXFP4 of gpt-oss",
}

HEAD = """# What runs with what

Each mark is a test that ran: greedy tokens in float32, alone and in a mixed batch with chunked prefill, equal to plain
transformers with the same weights (tiny random configs; the last row is the real model). ✓ passed, ✗ failed, blank: not
run. `ep`: each rank has whole experts. Above tp 1 pp 1 ranks are processes of one machine, as in production: shared
memory within a stage, gloo between stages, on CPUs. In the last two columns ranks are threads of one process, whose
pools the test can look into. Written by `tests/support/ranks/feature_table.py`.

What requests may ask for (seeds, penalties, bias, stops, logprobs, preemption, cached prefixes, cancels) is tested over
processes at tp 2, pp 2 and both in `tests/worker/parallel/test_process_requests.py`.

"""

FORMATS_HEAD = """
## Quantized checkpoints

The same for tiny checkpoints in each [format](formats.md), beside plain transformers with the same values in float32.

"""


def outcomes(report: Path) -> list[tuple[str, bool]]:
    """Name and success of every test that ran."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [
        (case.attrib["name"], case.find("failure") is None and case.find("error") is None)
        for case in cases
        if case.find("skipped") is None
    ]


def table(results: list[tuple[str, bool]]) -> str:
    """Families down, splits across."""
    cells: dict[tuple[str, str], bool] = {}
    for name, passed in results:
        for pattern, column in (
            (ONE_RANK, "tp 1 pp 1"),
            (ORACLE, "tp {tp} pp {pp}"),
            (REAL, "tp {tp} pp {pp}"),
            (EXPERTS, "ep {tp} pp {pp}"),
            (CACHED, "preempted, cached prefix"),
            (BOUNDED, "cache bounded by the window"),
        ):
            if found := pattern.fullmatch(name):
                family = {REAL: "SmolLM2-135M", BOUNDED: "mistral"}.get(pattern) or found["family"]
                key = family, column.format(**found.groupdict())
                cells[key] = cells.get(key, True) and passed
    return _lines("family | what is special", {name: f"{name} | {kind}" for name, kind in KINDS.items()}, cells)


def format_table(results: list[tuple[str, bool]]) -> str:
    """Formats of quantized checkpoints and families down, splits across."""
    cells = {
        (" ".join(found.group("format", "family")), _split(found)): passed
        for name, passed in results
        if (found := FORMAT.fullmatch(name)) and found["format"] in FORMATS
    }
    rows = dict.fromkeys(row for row, _ in cells)
    titles = {row: f"{FORMATS[row.split()[0]]} | {row.split()[1]}" for row in rows}
    return _lines("format | family", titles, cells)


def _split(found: re.Match[str]) -> str:
    return f"{'ep' if found['ep'] == 'True' else 'tp'} {found['tp']} pp {found['pp']}"


def _lines(head: str, titles: dict[str, str], cells: dict[tuple[str, str], bool]) -> str:
    columns = list(dict.fromkeys(column for _, column in cells))
    columns.sort(key=lambda column: (("tp", "ep", "pr", "ca").index(column[:2]), column))
    lines = [f"| {head} | " + " | ".join(columns) + " |", "| --- | --- |" + " :-: |" * len(columns)]
    for row, title in titles.items():
        marks = [{True: "✓", False: "✗", None: ""}[cells.get((row, column))] for column in columns]
        lines.append(f"| {title} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = [case for report in sys.argv[1:] for case in outcomes(Path(report))]
    TARGET.write_text(HEAD + table(found) + FORMATS_HEAD + format_table(found))
