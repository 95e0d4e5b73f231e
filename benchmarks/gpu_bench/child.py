"""The process of one section with one model: `python -m gpu_bench.child` with a `ChildOrder` in JSON.

It appends to a file, line by line, so that nothing measured is lost when it is ended: the device, its ceilings, each
figure, and at the end that it is complete or what was raised.
"""

import json
import platform
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_bench import roofline
from gpu_bench.section import SectionRun
from gpu_bench.sections import SECTIONS


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """What to run, and where to write."""

    section: str
    model: str
    device: str
    small: bool
    ends_at: float  # of `time.monotonic`, which all processes of a machine share
    answers: str  # the file of lines
    results: str  # the folder of files to keep


def device_facts(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    if device == "cpu":
        return {"device": "cpu", "threads": torch.get_num_threads(), "processor": platform.processor()}
    major, minor = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def run(order: ChildOrder) -> None:
    with open(order.answers, "a", buffering=1) as file, tempfile.TemporaryDirectory() as folder:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")

        try:
            write(device=device_facts(order.device))
            ceilings = roofline.measure(order.device)
            write(ceilings={name: round(value / 1e9, 1) for name, value in asdict(ceilings).items()})
            run = SectionRun(
                order.model, order.device, order.small, Path(folder), Path(order.results), order.ends_at, ceilings
            )
            for figure in SECTIONS[order.section].run(run):
                print(figure, flush=True)
                write(figure=figure.to_json())
            write(complete=True)
        except Exception as error:
            traceback.print_exc()
            write(error=f"{type(error).__name__}: {str(error)[:500]}")


if __name__ == "__main__":
    run(ChildOrder(**json.loads(sys.argv[1])))
