"""What a section is (a name, its models, a function that yields figures), and what one run of it gets."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_bench.roofline import Ceilings

if TYPE_CHECKING:  # the list of sections needs no torch
    from gpu_bench.bench import Bench

NO_MODEL = "-"
SMALL_MODEL = "tiny"
LOWER_IS_BETTER = ("s", "ms", "us", "GiB")
CHECK = "check"  # the unit of a figure that is right (1) or wrong (0)


@dataclass(frozen=True, slots=True)
class Figure:
    """`roofline`: the best value that bytes and products allow, in the same unit; None where none is known."""

    name: str
    value: float
    unit: str
    roofline: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # for the JSON file

    @classmethod
    def check(cls, name: str, right: bool, **extra: Any) -> "Figure":
        """Something that is either right or wrong."""
        return cls(name, float(right), CHECK, extra=extra)

    @property
    def is_wrong(self) -> bool:
        return self.unit == CHECK and not self.value

    @property
    def share(self) -> float | None:
        """Of the roofline that is reached: 1 is all of it."""
        if not self.roofline or not self.value:
            return None
        return self.roofline / self.value if self.unit in LOWER_IS_BETTER else self.value / self.roofline

    def row(self) -> str:
        if self.unit == CHECK:
            extra = ", ".join(f"{name} {value}" for name, value in self.extra.items())
            return f"{self.name:<58} {'WRONG' if self.is_wrong else 'right':>12}  {extra}"[:200]
        text = f"{self.name:<58} {_number(self.value):>12} {self.unit:<8}"
        if self.roofline:
            text += f" roofline {_number(self.roofline):>10} ({self.share or 0:.0%})"
        return text.rstrip()

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"value": _rounded(self.value)}
        if self.roofline is not None:
            found |= {"roofline": _rounded(self.roofline), "share": self.share and round(self.share, 3)}
        return {name: value for name, value in found.items() if value not in (None, {})}


@dataclass(frozen=True, slots=True)
class SectionRun:
    """One run of a section with one model."""

    model: str
    device: str  # cpu or cuda
    small: bool  # on a CPU: the same code with few and short requests
    folder: Path  # for files of this run alone
    results: Path  # for files to keep
    ceilings: Ceilings
    _usual: "list[Bench]" = field(default_factory=list, init=False)

    def bench(self, **options: Any) -> "Bench":
        """An engine for the model of this run."""
        from gpu_bench.bench import Bench

        if self.small:
            options = {"kv_cache_memory": 64 << 20, "cpu_threads": 1} | options
        return Bench(self.model, self.folder, self.device, **options)

    def usual_bench(self) -> "Bench":
        """The engine of the sections that change nothing about it: made once in a process, since that takes long."""
        if not self._usual:
            self._usual.append(self.bench(max_model_len=40960))
        return self._usual[0]


@dataclass(frozen=True, slots=True)
class Section:
    """`run` yields each figure as soon as it is measured: those of a section that is ended are kept."""

    name: str
    summary: str
    models: tuple[str, ...]
    seconds: float  # that it takes on one H100, with all of its models
    run: Callable[[SectionRun], Iterator[Figure]]
    small: tuple[str, ...] = (SMALL_MODEL,)  # models of --small


def _rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
