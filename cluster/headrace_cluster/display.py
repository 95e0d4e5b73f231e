"""How far a start is, on stderr: bars on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Protocol


def say(sentence: str) -> None:
    """One line for the person who started this."""
    print(f"headrace: {sentence}", file=sys.stderr, flush=True)


class StartDisplay(Protocol):
    """Shows parts of a start, each with its stage."""

    def update(self, part: str, stage: str, fraction: float) -> None:
        """`fraction` is 0..1."""
        ...

    def __enter__(self) -> "StartDisplay": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def start_display() -> StartDisplay:
    """The one that fits stderr."""
    return _Bars() if sys.stderr.isatty() else _Lines()


class _Lines:
    """A line whenever a stage changes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown: dict[str, str] = {}

    def update(self, part: str, stage: str, fraction: float) -> None:
        if self._shown.get(part) != stage:
            self._shown[part] = stage
            say(f"[{time.monotonic() - self._began:5.1f} s] {part}: {stage}")

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Bars:
    """A live bar per part."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, int] = {}

    def update(self, part: str, stage: str, fraction: float) -> None:
        from rich.markup import escape

        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(escape(part), total=1.0, stage=escape(stage))
        self._progress.update(self._tasks[part], completed=fraction, stage=escape(stage))  # type: ignore[arg-type]

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
