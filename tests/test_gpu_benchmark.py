"""The GPU benchmark on a machine without a GPU: every section runs small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_bench import timeline
from gpu_bench.roofline import Ceilings, Cost, ModelSizes
from gpu_bench.sections import SECTIONS

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "benchmarks" / "gpu.py")]
EXPECTED: dict[str, tuple[str, str, Any]] = {  # section: a figure, and a fact of it
    "families": ("deepseek_v3", "positions", 120),
    "correctness": ("float32, graphs on: tokens of plain transformers", "positions", 192),
    "nccl": ("steps with a group's all-reduces, recorded", "places", 4),
    "trace": ("batch 1: a step", "steps", 20),
    "ttft": ("prompt of 200, cached", "cached_tokens", 192),
    "modes": ("deterministic: alone as together", "equal", 16),
}


TOGETHER = (
    "libraries",
    "ttft",
    "decode",
    "other-caches",
    "serving",
)  # a process without a model, and one with one engine


@pytest.mark.parametrize("name", [*(name for name in SECTIONS if name not in TOGETHER), ",".join(TOGETHER)])
def test_a_section_runs_small_on_a_cpu(name: str, tmp_path: Path) -> None:
    command = [*COMMAND, name, "--small", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    heads = [line for line in lines if "device" in line]
    assert all(head["device"]["device"] == "cpu" and head["ceilings"]["bytes_s"] > 0 for head in heads)
    assert list(dict.fromkeys(head["section"] for head in heads)) == name.split(",")  # once for each model
    figures = {(line["section"], line["name"]): line for line in lines if "value" in line}
    assert {section for section, _ in figures} == set(name.split(","))
    assert all(figure in done.stdout for _, figure in figures)
    for section in name.split(","):
        if section in EXPECTED:
            figure, fact, value = EXPECTED[section]
            assert figures[section, figure]["extra"][fact] == value


@pytest.mark.parametrize("wrong", [["nonsense"], ["ttft", "--models", "nonsense"]])
def test_names_that_do_not_exist(wrong: list[str]) -> None:
    done = subprocess.run(
        [*COMMAND, *wrong, "--device", "cuda"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "nonsense" in done.stderr


LLAMA = ModelSizes(
    read_bytes=15_009_857_536, weights=7_504_928_768, head_weights=128256 * 4096, kv_token_bytes=131072,
    attention_flop=4 * 4096 * 32,
)  # fmt: skip


def test_the_roofline_of_steps() -> None:
    one = LLAMA.decode([1000.0])
    assert one.bytes == 15_009_857_536 + 1001 * 131072
    assert one.flop == 2 * 7_504_928_768 + 1000 * 524288
    many = LLAMA.decode([1000.0] * 256)
    assert many.bytes == 15_009_857_536 + 256 * 1001 * 131072 and many.flop == 256 * one.flop
    ceilings = Ceilings(bytes_s=4.3e12, flop_s=790e12)
    assert 1 / ceilings.seconds(one) == pytest.approx(284, abs=1), "8B in bfloat16 on an H200"
    assert ceilings.seconds(Cost(0.0, 79e12)) == pytest.approx(0.1)
    prompt = LLAMA.prefill(1024)
    assert prompt.flop == pytest.approx(2 * (7_504_928_768 - 525_336_576) * 1024, rel=0.05)


def test_the_gap_of_a_trace_is_the_time_without_any_event() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 100.0, "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 105.0, "dur": 2.0},  # on another stream
        {"ph": "X", "cat": "gpu_memcpy", "name": "c", "ts": 108.0, "dur": 7.0},
        {"ph": "X", "cat": "kernel", "name": "d", "ts": 135.0, "dur": 5.0},
        {"ph": "X", "cat": "cpu_op", "name": "host", "ts": 0.0, "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
    trace = json.dumps({"traceEvents": events}).encode()
    found = timeline.read_timeline(trace, on_device=True)
    assert (found.span, found.busy, found.longest_gap) == pytest.approx((40e-6, 20e-6, 20e-6))
    assert found.events == 4
    assert timeline.read_timeline(trace, on_device=False).span == pytest.approx(500e-6)
    with pytest.raises(ValueError, match="no event of the device"):
        timeline.read_timeline(b'{"traceEvents": []}', on_device=True)
