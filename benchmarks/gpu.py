"""The engine and its kernels on one GPU: no Ray, no network, random weights of real configs.

    python benchmarks/gpu.py --list
    timeout 400 python benchmarks/gpu.py ttft,decode,serving [--models qwen3-0.6b,llama-8b] [--out FOLDER]
    python benchmarks/gpu.py decode --small                 the same code with a tiny model, on any machine

Several sections in one command have one engine for each model. A figure is printed, and appended to
FOLDER/results.jsonl, as soon as it is measured.
Status 1 when a check is wrong. What a machine without a network needs besides torch, triton and transformers:
benchmarks/gpu_wheels.sh.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = [str(ROOT / name) for name in ("benchmarks", "proto", "kernels", "worker", "router", "cluster", "tests")]
sys.path[:0] = IMPORTED  # a machine with a GPU has the checkout, and no installation of it

import machine  # noqa: E402
from gpu_bench import roofline  # noqa: E402
from gpu_bench.models import MODELS  # noqa: E402
from gpu_bench.section import NO_MODEL, Section, SectionRun  # noqa: E402
from gpu_bench.sections import SECTIONS  # noqa: E402


def models_of(section: Section, wanted: str | None, small: bool) -> list[str]:
    """The models that a section runs with."""
    if section.models == (NO_MODEL,):
        return [NO_MODEL] if wanted in (None, NO_MODEL) else []
    models = section.small if small else section.models
    return [model for model in models if wanted is None or model in wanted.split(",")]


def device_facts(device: str) -> dict[str, Any]:
    """What the figures are measured on."""
    import torch

    if device == "cpu":
        return {"device": "cpu", "threads": torch.get_num_threads(), "processor": platform.processor()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def measure(sections: list[Section], model: str, device: str, small: bool, out: Path) -> bool:
    """Runs sections with one model. Returns whether all of their checks are right."""
    ceilings = roofline.measure(device)
    at = {name: round(value / 1e9, 1) for name, value in asdict(ceilings).items()}  # GB/s, GFLOP/s
    print(f"{model}: a copy {at['bytes_s']:.0f} GB/s, a product {at['flop_s'] / 1e3:.1f} TFLOP/s")
    right = True
    with (out / "results.jsonl").open("a", buffering=1) as file, tempfile.TemporaryDirectory() as folder:
        run = SectionRun(model, device, small, Path(folder), out, ceilings)
        for section in sections:
            about = {"section": section.name, "model": model, "ceilings": at, "device": device_facts(device)}
            file.write(json.dumps(about | {"machine": machine.describe()}) + "\n")
            print(section.name)
            for figure in section.run(run):
                print(" ", figure.row(), flush=True)
                file.write(json.dumps({"section": section.name, "model": model} | figure.to_json()) + "\n")
                right = right and not figure.is_wrong
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="?", default="", metavar="SECTION[,SECTION]", help="of --list")
    parser.add_argument("--list", action="store_true", help="the sections, and nothing else")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; without: those of the section")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a tiny model and few short requests")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of traces and results.jsonl")
    arguments = parser.parse_args()
    if arguments.list or not arguments.sections:
        for section in SECTIONS.values():
            print(f"{section.name:<12} {section.seconds:3.0f} s  {', '.join(section.models):<22} {section.summary}")
        return
    if unknown := set(arguments.sections.split(",")) - set(SECTIONS):
        parser.error(f"No such section: {', '.join(sorted(unknown))}. See --list.")
    import torch

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.small:
        sys.exit("There is no GPU here; --small runs the same code with a tiny model on a CPU.")
    os.environ["PYTHONPATH"] = os.pathsep.join([*IMPORTED, os.environ.get("PYTHONPATH", "")])  # of child processes
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Section]] = {}  # by model
    for section in (SECTIONS[name] for name in arguments.sections.split(",")):
        for model in models_of(section, arguments.models, arguments.small):
            runs.setdefault(model, []).append(section)
    if not runs:
        parser.error(f"No such model of these sections: {arguments.models}. See --list.")
    if len(runs) == 1:
        [(model, sections)] = runs.items()
        sys.exit(not measure(sections, model, device, arguments.small, arguments.out))
    # A process for each model: the memory and the clocks that another one leaves change what is measured.
    failed = False
    for model, sections in runs.items():
        names = ",".join(section.name for section in sections)
        own = [sys.executable, __file__, names, "--models", model, "--device", device, "--out", str(arguments.out)]
        own += ["--small"] if arguments.small else []
        failed |= bool(subprocess.run(own, check=False).returncode)
    sys.exit(failed)


if __name__ == "__main__":
    main()
