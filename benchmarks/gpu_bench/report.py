"""The results of one command: a table on the terminal, and JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_bench.figure import CHECK, LOWER_IS_BETTER
from gpu_bench.goals import GOALS

NOT_RUN = "not run"


@dataclass(slots=True)
class SectionResult:
    """Of a section with one model."""

    section: str
    model: str
    seconds: float = 0.0
    problem: str = ""  # why it is not complete
    device: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)  # in GB/s and GFLOP/s
    figures: list[dict[str, Any]] = field(default_factory=list)

    def read(self, answers: Path) -> None:
        """Takes the lines that its process wrote."""
        complete = False
        for text in answers.read_text().splitlines() if answers.exists() else []:
            line = json.loads(text)
            self.device = line.get("device", self.device)
            self.ceilings = line.get("ceilings", self.ceilings)
            complete = line.get("complete", complete)
            self.problem = line.get("error", self.problem)
            if (figure := line.get("figure")) is not None:
                goal = GOALS.get((self.section, self.model, figure["name"]))
                self.figures.append(figure if goal is None else figure | {"goal": goal})
        if not complete and not self.problem:
            self.problem = "its process ended without a result"

    @property
    def is_right(self) -> bool:
        return not self.problem and not any(_is_wrong(figure) for figure in self.figures)

    def rows(self) -> list[str]:
        """A heading, and one line for each figure."""
        found = [f"{self.section} {self.model}: {self.seconds:.0f} s{f' - {self.problem}' if self.problem else ''}"]
        if self.ceilings:
            at = self.ceilings
            found[0] += f" (a copy {at['bytes_s']:.0f} GB/s, a product {at['flop_s'] / 1e3:.1f} TFLOP/s)"
        return found + [f"  {_row(figure)}" for figure in self.figures]


def to_json(machine: dict[str, Any], results: list[SectionResult]) -> dict[str, Any]:
    """Machine, command and versions; then each section."""
    device = next((result.device for result in results if result.device), {})
    return {
        "machine": machine,
        "device": device,
        "results": [
            {
                "section": result.section,
                "model": result.model,
                "seconds": round(result.seconds, 1),
                "problem": result.problem,
                "ceilings": result.ceilings,
                "figures": result.figures,
            }
            for result in results
        ],
    }


def _is_wrong(figure: dict[str, Any]) -> bool:
    return figure["unit"] == CHECK and not figure["value"]


def _row(figure: dict[str, Any]) -> str:
    if figure["unit"] == CHECK:
        extra = ", ".join(f"{name} {value}" for name, value in figure.get("extra", {}).items())
        return f"{figure['name']:<58} {'WRONG' if _is_wrong(figure) else 'right':>12}  {extra}"[:200]
    text = f"{figure['name']:<58} {_number(figure['value']):>12} {figure['unit']:<8}"
    if "roofline" in figure:
        text += f" roofline {_number(figure['roofline']):>10} ({figure['share'] or 0:.0%})"
    if "goal" in figure:
        lower = figure["unit"] in LOWER_IS_BETTER
        reached = figure["value"] <= figure["goal"] if lower else figure["value"] >= figure["goal"]
        text += f" goal {_number(figure['goal'])}: {'reached' if reached else 'missed'}"
    return text.rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
