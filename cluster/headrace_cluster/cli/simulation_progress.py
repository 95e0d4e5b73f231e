"""How far a simulation is, on stderr: a bar on a terminal, else a line now and then."""

import sys
from time import perf_counter
from types import TracebackType
from typing import Any

from headrace_cluster.simulator.simulation import WARM_UP_SECONDS, Simulation

LINE_SECONDS = 5.0  # of this machine's time, between two lines


class SimulationProgress:
    """Entered with `with`. Ctrl-C within prints how far it came."""

    def __init__(self, action: str, total: int) -> None:
        """action: such as 'simulating'. total: requests."""
        self._action = action
        self._total = total
        self._ended = 0
        self._shown = perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "SimulationProgress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._action, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            where = "" if self._action == "simulating" else f" of {self._action}"
            print(f"stopped after {self._ended} of {self._total} requests{where}; nothing was written", file=sys.stderr)

    def show(self, simulation: Simulation) -> None:
        """Called now and then while it runs."""
        self._ended = simulation.ended
        if self._bar is not None:
            self._bar.update(self._task, completed=self._ended)
        elif perf_counter() - self._shown >= LINE_SECONDS:
            self._shown = perf_counter()
            virtual = max(0.0, simulation.time.now - WARM_UP_SECONDS)
            line = f"{self._action}: {self._ended} of {self._total} requests, {virtual:.0f} s of virtual time"
            print(line, file=sys.stderr, flush=True)
