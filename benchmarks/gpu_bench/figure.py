"""One measured figure of a section, beside what the machine could do at most and what the project aims at."""

from dataclasses import asdict, dataclass, field
from typing import Any

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
    def share(self) -> float | None:
        """Of the roofline that is reached: 1 is all of it."""
        if not self.roofline or not self.value:
            return None
        return self.roofline / self.value if self.unit in LOWER_IS_BETTER else self.value / self.roofline

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"value": rounded(self.value)}
        if self.roofline is not None:
            found |= {"roofline": rounded(self.roofline), "share": self.share and round(self.share, 3)}
        return {name: value for name, value in found.items() if value not in (None, {})}


def rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")
