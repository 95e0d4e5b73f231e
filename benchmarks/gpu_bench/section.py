"""What a section is: a name, its models, its time limit, and a function that yields figures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_bench.figure import Figure
from gpu_bench.roofline import Ceilings

if TYPE_CHECKING:  # the list of sections needs no torch
    from gpu_bench.bench import Bench

NO_MODEL = "-"
SMALL_MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class SectionRun:
    """One run of a section with one model, in a process of its own."""

    model: str
    device: str  # cpu or cuda
    small: bool  # on a CPU: the same code with few and short requests
    folder: Path  # for files of this run alone
    results: Path  # for files to keep
    ends_at: float  # of `time.monotonic`: then this process is ended
    ceilings: Ceilings

    def bench(self, **options: Any) -> "Bench":
        """An engine for the model of this run."""
        from gpu_bench.bench import Bench

        if self.small:
            options = {"kv_cache_memory": 64 << 20, "cpu_threads": 1} | options
        return Bench(self.model, self.folder, self.device, **options)


@dataclass(frozen=True, slots=True)
class Section:
    """`run` yields each figure as soon as it is measured: those of a section that is ended are kept."""

    name: str
    summary: str
    models: tuple[str, ...]
    seconds: float  # for all of its models, together
    run: Callable[[SectionRun], Iterator[Figure]]
