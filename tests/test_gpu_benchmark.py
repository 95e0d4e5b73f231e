"""The GPU benchmark on a machine without a GPU: every section runs small; a crash or a hang is recorded."""

import json
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import gpu
import pytest
from gpu_bench import isolation, timeline
from gpu_bench.figure import Figure
from gpu_bench.goals import GOALS
from gpu_bench.models import MODELS
from gpu_bench.report import SectionResult
from gpu_bench.roofline import Ceilings, Cost, ModelSizes
from gpu_bench.section import NO_MODEL
from gpu_bench.sections import CALLS, SECTIONS, serving

FOLDER = Path(__file__).parents[1] / "benchmarks"
COMMAND = [sys.executable, str(FOLDER / "gpu.py")]


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Output and folder of each call, with a tiny model on the CPU; all run at the same time."""
    folders = {call: tmp_path_factory.mktemp(call) for call in CALLS}
    running = {
        call: subprocess.Popen(
            [*COMMAND, "--small", "--device", "cpu", "--sections", call, "--out", str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for call, folder in folders.items()
    }  # fmt: skip
    found = {}
    for call, process in running.items():
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
        found[call] = (output, folders[call])
    return found


def results(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return read


@pytest.mark.parametrize("call", CALLS)
def test_every_section_runs_small_on_a_cpu(small_runs: dict[str, tuple[str, Path]], call: str) -> None:
    output, folder = small_runs[call]
    found = results(folder)
    assert found["machine"]["command"].startswith("gpu.py --small") and found["machine"]["versions"]["torch"]
    assert found["device"]["device"] == "cpu"
    assert [result["section"] for result in found["results"]] == list(CALLS[call])
    for result in found["results"]:
        assert result["figures"] and not result["problem"] and result["ceilings"]["bytes_s"] > 0, result
        assert (folder / f"{result['section']}.log").read_text()
        for figure in result["figures"]:
            assert figure["name"] in output
            assert figure["value"] > 0 or figure["unit"].startswith("of "), figure
    assert len(list(folder.iterdir())) <= 8, "so many files come back from a machine that is lent"


def figures(folder: Path, section: str) -> dict[str, dict[str, Any]]:
    (result,) = (result for result in results(folder)["results"] if result["section"] == section)
    return {figure["name"]: figure for figure in result["figures"]}


def test_the_sections_measure_what_they_name(small_runs: dict[str, tuple[str, Path]]) -> None:
    contact, speed, load, replicas = (small_runs[call][1] for call in ("contact", "speed", "load", "replicas"))
    tokens = figures(contact, "correctness")["float32, graphs on: tokens of plain transformers"]["extra"]
    assert tokens["positions"] == 192 and tokens["wrong"] == 0
    assert figures(contact, "kernels")["passed tests"]["value"] >= 10
    group = figures(contact, "nccl")["steps with a group's all-reduces, recorded"]["extra"]
    assert group["places"] == 4 and group["calls_while_serving"] > 0
    decoding = figures(speed, "decode")
    for limit in (4096, 40960):
        for sampling in ("greedy", "temperature 0.6, top-p 0.95"):
            assert decoding[f"batch 1, {sampling}, limit {limit}"]["roofline"] > 0
    traced = figures(speed, "trace")["batch 1: gap in a step"]["extra"]
    assert (speed / traced["trace"]).stat().st_size > 1000
    assert figures(speed, "trace")["batch 1: a step"]["extra"]["steps"] == 20
    assert figures(load, "ttft")["prompt of 200, cached"]["extra"]["cached_tokens"] == 192
    served = figures(load, "serving")
    for suffix in ("", ", limit 40960"):
        assert served[f"16 requests of 10-60, greedy{suffix}"]["extra"]["steps"] > 10
    assert figures(replicas, "transfer")["every fetch delivers"]["extra"]["fetches"] > 4
    assert figures(load, "modes")["deterministic: alone as together"]["extra"]["equal"] == 16


def test_a_goal_belongs_to_a_figure(small_runs: dict[str, tuple[str, Path]]) -> None:
    names = {("decode", name) for name in figures(small_runs["speed"][1], "decode")}
    names |= {("serving", f"{serving.workload(model, False)[0]}, greedy") for model in SECTIONS["serving"].models}
    assert {(section, name) for section, _, name in GOALS} <= names
    assert all(model in SECTIONS[section].models for section, model, _ in GOALS)


def test_each_section_belongs_to_a_call_and_ends_within_eight_minutes() -> None:
    assert sorted(name for names in CALLS.values() for name in names) == sorted(SECTIONS)
    assert all(section.seconds < 480 for section in SECTIONS.values())
    assert {model for section in SECTIONS.values() for model in section.models} <= {NO_MODEL, *MODELS}


def test_each_call_fits_into_ten_minutes_with_all_its_sections() -> None:
    for names in CALLS.values():
        assert sum(SECTIONS[name].seconds for name in names) <= 560


def test_time_that_is_left_is_shared() -> None:
    nccl, kernels = SECTIONS["nccl"], SECTIONS["kernels"]
    both = nccl.seconds + kernels.seconds
    assert gpu.limit_of(nccl, [nccl, kernels], both) == nccl.seconds
    assert gpu.limit_of(nccl, [nccl, kernels], both / 2) == nccl.seconds, "the runner bounds it by what is left"
    assert gpu.limit_of(nccl, [nccl, kernels], both * 1.5) == nccl.seconds * 1.5
    assert gpu.limit_of(kernels, [kernels], 3600) == 480


def test_the_list_names_every_section() -> None:
    done = subprocess.run([*COMMAND, "--list"], capture_output=True, text=True, timeout=60, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == {*CALLS, *SECTIONS}
    done = subprocess.run([*COMMAND, "--sections", "other"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no section 'other'" in done.stderr


CHILD = """
import json, os, sys, time
order = json.loads(sys.argv[1])
with open(order["answers"], "w") as file:
    print(json.dumps({"device": {"device": "cpu"}}), file=file)
    print(json.dumps({"figure": {"name": "a first one", "value": 1.0, "unit": "us"}}), file=file)
print("before", flush=True)
if os.fork() == 0:
    time.sleep(60)
ENDING
"""


@pytest.mark.parametrize(
    ("ending", "problem"),
    [
        ("os.abort()", "the process was ended by SIGABRT"),
        ("time.sleep(60)", "it ran longer than 6 s and was ended"),
        ("sys.exit(3)", "the process ended with status 3"),
        ("pass", "its process ended without a result"),
    ],
)
def test_a_section_that_ends_early_keeps_its_figures_and_log(tmp_path: Path, ending: str, problem: str) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace("ENDING", ending))
    out = tmp_path / "out"
    out.mkdir()
    runner = gpu.SectionRunner("cpu", True, out, time.monotonic() + 100, [str(child)])
    began = time.monotonic()
    result = runner.run(SECTIONS["decode"], "tiny", 6.0)
    assert time.monotonic() - began < 30, "its own children end with it"
    assert (result.problem, result.is_right) == (problem, False)
    assert [figure["name"] for figure in result.figures] == ["a first one"]
    assert (out / "decode.log").read_text() == "before\n"


def test_no_section_begins_when_the_time_of_the_command_is_over(tmp_path: Path) -> None:
    runner = gpu.SectionRunner("cpu", True, tmp_path, time.monotonic() + 4, ["-c", "raise AssertionError"])
    assert runner.run(SECTIONS["decode"], "tiny", 100.0).problem == "not run: no time is left"
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_section_is_its_result(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text(json.dumps({"error": "ValueError: a reason"}) + "\n")
    result = SectionResult("decode", "tiny")
    result.read(tmp_path / "answers")
    assert result.problem == "ValueError: a reason" and "a reason" in result.rows()[0]


def test_a_figure_is_printed_beside_its_roofline_and_goal(tmp_path: Path) -> None:
    name = "batch 1, greedy, limit 4096"
    lines = [
        {"figure": Figure(name, 216.0, "tok/s", 270.0).to_json()},
        {"figure": Figure("a time", 2.0, "ms", 1.0).to_json()},
        {"figure": Figure.check("a rule", False, found=3).to_json()},
        {"complete": True},
    ]
    (tmp_path / "answers").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = SectionResult("decode", "llama-8b")
    result.read(tmp_path / "answers")
    _, first, second, third = result.rows()
    assert first.split()[-8:] == ["216", "tok/s", "roofline", "270", "(80%)", "goal", "240:", "missed"]
    assert "(50%)" in second and "goal" not in second
    assert "WRONG" in third and "found 3" in third and not result.is_right


def test_the_log_of_a_command_has_both_streams(tmp_path: Path) -> None:
    script = "import sys; print('one'); print('two', file=sys.stderr)"
    ended = isolation.run([sys.executable, "-c", script], {}, tmp_path / "log", 30)
    assert not ended.problem and sorted((tmp_path / "log").read_text().split()) == ["one", "two"]


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


def test_the_roofline_of_a_workload_is_that_of_its_steps() -> None:
    lengths = [(3, 4), (10, 2)]
    steps = LLAMA.decode([4.0]) + LLAMA.decode([5.0]) + LLAMA.decode([6.0]) + LLAMA.decode([11.0])
    whole = LLAMA.workload(lengths)
    assert whole.flop == steps.flop + LLAMA.prefill(3).flop + LLAMA.prefill(10).flop
    # The weights once for each token of the longest output; each step's keys and values, and those of the prompts.
    keys = steps.bytes - 4 * LLAMA.read_bytes + 13 * LLAMA.kv_token_bytes
    assert whole.bytes == 4 * LLAMA.read_bytes + keys


def test_the_sizes_of_a_model_leave_out_the_input_embedding(tmp_path: Path) -> None:
    from gpu_bench.bench import Bench

    tied = Bench("tiny", tmp_path, "cpu", kv_cache_memory=8 << 20)
    sizes, config = tied.sizes, MODELS["tiny"]
    head = config["vocab_size"] * config["hidden_size"]
    assert sizes.read_bytes == tied.model.weight_bytes == 4 * sizes.weights
    assert sizes.head_weights == head
    assert sizes.kv_token_bytes == 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 16 * 4
    MODELS["untied"] = config | {"tie_word_embeddings": False}
    try:
        untied = Bench("untied", tmp_path, "cpu", kv_cache_memory=8 << 20)
    finally:
        del MODELS["untied"]
    assert untied.model.weight_bytes == tied.model.weight_bytes + 4 * head
    assert untied.sizes == sizes


def test_a_closed_bench_frees_its_engine_and_cache(tmp_path: Path) -> None:
    from gpu_bench.bench import SAMPLED, Bench

    first = Bench("tiny", tmp_path, "cpu", kv_cache_memory=8 << 20)
    _, done, facts = first.run([(20, 4), (3, 6)], SAMPLED)
    assert [len(completion.token_ids) for completion in done] == [4, 6] and facts["steps"] > 5
    assert first.decode_seconds(2, 16, 12) > 0
    freed = weakref.ref(first.engine.assembly.runner)
    loaded = first.close()
    assert freed() is None, "the next engine gets its memory"
    again = Bench("tiny", tmp_path, "cpu", loaded=loaded, kv_cache_memory=8 << 20)
    assert again.model is loaded


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
