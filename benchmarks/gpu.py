"""The engine and its kernels on one GPU: no Ray, no network, random weights of real configs.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py [--sections contact | decode,serving ...] [--models qwen3-0.6b,llama-8b] [--out FOLDER]
    python benchmarks/gpu.py --small [--sections ...]       the same code with a tiny model, on any machine

Each section runs with each of its models in a process of its own, within its time limit: one that crashes or hangs is
recorded, with its full log, and the next one runs. --out gets a log per section, traces, and results.json, which is
written anew after each. Status 1 when a check is wrong or a section is not complete. What a machine without a network
needs besides torch, triton and transformers: benchmarks/gpu_wheels.sh.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import machine
from gpu_bench import isolation, report
from gpu_bench.child import ChildOrder
from gpu_bench.models import MODELS
from gpu_bench.section import NO_MODEL, SMALL_MODEL, Section
from gpu_bench.sections import CALLS, SECTIONS

ROOT = Path(__file__).parents[1]
IMPORTED = ("benchmarks", "proto", "kernels", "worker", "router", "cluster", "tests")
START_SECONDS = 5.0  # less is too little for any section
MOST_SECONDS = 480.0  # of a section


def chosen(text: str) -> list[Section]:
    """Sections by their names and those of calls. Exits with a sentence for any other name."""
    names = [one for name in text.split(",") for one in CALLS.get(name, (name,))]
    for name in names:
        if name not in SECTIONS:
            sys.exit(f"There is no section '{name}': choose from {', '.join([*CALLS, *SECTIONS])}.")
    return [SECTIONS[name] for name in names]


def models_of(section: Section, wanted: str | None, small: bool) -> list[str]:
    """The models that a section runs with."""
    if section.models == (NO_MODEL,):
        return [NO_MODEL]
    if small:
        return [SMALL_MODEL]
    return [model for model in section.models if wanted is None or model in wanted.split(",")]


def limit_of(section: Section, remaining: Sequence[Section], left: float) -> float:
    """Seconds that the first of the remaining sections may take: time that earlier ones did not use is shared."""
    share = left / sum(other.seconds for other in remaining)
    return min(section.seconds * max(1.0, share), MOST_SECONDS)


class SectionRunner:
    """Runs sections one after the other, until the time of the whole command is over."""

    def __init__(
        self, device: str, small: bool, out: Path, ends_at: float, child: Sequence[str] = ("-m", "gpu_bench.child")
    ) -> None:
        """`ends_at`: of `time.monotonic`. `child`: what Python runs, with a `ChildOrder` in JSON."""
        self._child = child
        self._device = device
        self._small = small
        self._out = out
        self._ends_at = ends_at
        path = os.pathsep.join([*(str(ROOT / name) for name in IMPORTED), os.environ.get("PYTHONPATH", "")])
        self._environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"}

    def run(self, section: Section, model: str, seconds: float) -> report.SectionResult:
        """At most `seconds`, and less if the command ends before."""
        result = report.SectionResult(section.name, model)
        seconds = min(seconds, self._ends_at - time.monotonic())
        if seconds < START_SECONDS:
            result.problem = f"{report.NOT_RUN}: no time is left"
            return result
        with tempfile.TemporaryDirectory() as folder:
            answers = Path(folder) / "answers.jsonl"
            order = ChildOrder(
                section.name, model, self._device, self._small, time.monotonic() + seconds, str(answers),
                str(self._out.resolve()),
            )  # fmt: skip
            command = [sys.executable, *self._child, json.dumps(asdict(order))]
            ended = isolation.run(command, self._environment, self._out / f"{section.name}.log", seconds)
            result.read(answers)
        result.seconds = ended.seconds
        result.problem = ended.problem or result.problem
        return result


def show_list() -> None:
    for name, sections in CALLS.items():
        print(f"{name:<12} {', '.join(sections)}")
    for section in SECTIONS.values():
        print(f"{section.name:<12} {section.seconds:3.0f} s  {', '.join(section.models):<22} {section.summary}")


def choose_device(wanted: str, small: bool) -> str:
    """Imports torch only in another process: this one must not take memory of the GPU."""
    if wanted != "auto":
        return wanted
    done = isolation.run(
        [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"],
        os.environ, Path(os.devnull), 120,
    )  # fmt: skip
    if done.problem and not small:
        sys.exit("There is no GPU here; --small runs the same code with a tiny model on a CPU.")
    return "cpu" if done.problem else "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the sections and groups of them, and nothing else")
    parser.add_argument("--sections", default=",".join(CALLS), help="names or groups of sections, with commas: --list")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; without: those of each section")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny model and few short requests")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of logs, traces and results.json")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the whole command")
    parser.add_argument("--save", action="store_true", help="append to results/gpu.jsonl")
    arguments = parser.parse_args()
    if arguments.list:
        show_list()
        return
    sections, ends_at = chosen(arguments.sections), time.monotonic() + arguments.seconds
    device = choose_device(arguments.device, arguments.small)
    arguments.out.mkdir(parents=True, exist_ok=True)
    runner = SectionRunner(device, arguments.small, arguments.out, ends_at)
    results: list[report.SectionResult] = []
    for place, section in enumerate(sections):
        (arguments.out / f"{section.name}.log").unlink(missing_ok=True)
        left = limit_of(section, sections[place:], ends_at - time.monotonic())
        for model in models_of(section, arguments.models, arguments.small):
            result = runner.run(section, model, left)
            left -= result.seconds
            results.append(result)
            print(*result.rows(), sep="\n", flush=True)
            found = report.to_json(machine.describe(), results)
            (arguments.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    if arguments.save:
        print(machine.save("gpu", {name: value for name, value in found.items() if name != "machine"}))
    if not all(result.is_right for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
