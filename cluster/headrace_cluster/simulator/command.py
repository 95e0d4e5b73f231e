"""The work of `headrace simulate`, with its progress."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from headrace_base.errors import HeadraceError
from headrace_cluster.errors import SpecError
from headrace_cluster.simulator.capacity import SAMPLE, round_robin_capacity
from headrace_cluster.simulator.cluster_change import ClusterChange, read_changes
from headrace_cluster.simulator.generated import GENERATED, generated, generated_name
from headrace_cluster.simulator.latency_model import LatencyModel, latency_model
from headrace_cluster.simulator.output import check_output, rows, write
from headrace_cluster.simulator.policies import new_policy
from headrace_cluster.simulator.result import Result, Slo, result_of
from headrace_cluster.simulator.simulation import WARM_UP_SECONDS, Setup, Simulation
from headrace_cluster.simulator.trace import Trace, read_trace
from headrace_router.config import policy_hint

LINE_SECONDS = 5.0  # this machine's time between two lines


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


GENERATED_REQUESTS = 1024  # without --limit


@contextmanager
def wrong_usage(hint: str = "") -> Iterator[None]:
    """An error within is one of the command line. Raises SpecError."""
    try:
        yield
    except HeadraceError as error:
        raise SpecError(f"{error} {hint}".rstrip()) from None


def policy_name(name: str) -> str:
    """As the simulator lists it. Raises SpecError."""
    hint = policy_hint(name)
    with wrong_usage(hint and f"{hint[0].upper()}{hint[1:]}."):
        new_policy(name)
    return name.lower().replace("_", "-")


def latency_option(name: str) -> LatencyModel:
    """Raises SpecError."""
    with wrong_usage():
        return latency_model(name)


def changes_option(text: str) -> list[ClusterChange]:
    """Raises SpecError."""
    with wrong_usage():
        return read_changes(text)


def check_options(setup: Setup, slo: Slo, speed: float, load: float | None) -> None:
    """What needs no trace. Raises SpecError."""
    with wrong_usage():
        setup.check()
    if not all(isfinite(seconds) and seconds > 0 for seconds in (slo.ttft, slo.tpot)):
        raise SpecError("--slo-ttft and --slo-tpot are seconds above 0.")
    if load is not None and not (isfinite(load) and load > 0):
        raise SpecError("--load is a share above 0; pass 0.8 for 80 %.")
    if not (isfinite(speed) and speed > 0):
        raise SpecError("--speed is above 0; pass 2 for twice as many requests per second.")


def load_trace(name: str, limit: int | None, seed: int) -> Trace:
    """A file, or a generated load. Raises SimulationError, and SpecError for a name that is neither."""
    path = Path(name)
    if generated_name(name) in GENERATED and not path.is_file():
        return generated(name, limit or GENERATED_REQUESTS, seed)
    if not path.exists() and not path.suffix:
        raise SpecError(f"There is no trace '{name}'; name a .jsonl or .csv file, or one of {', '.join(GENERATED)}.")
    trace = read_trace(path, seed)
    return trace.first(limit) if limit else trace


def simulate(
    trace: Trace,
    setup: Setup,
    slo: Slo,
    *,
    limit: int | None = None,
    speed: float = 1.0,
    load: float | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Prints the results. load: instead of a speed, as a share of what round robin can serve. Raises HeadraceError."""
    check_options(setup, slo, speed, load)
    if setup.policy == "session" and not trace.has_sessions:
        raise SpecError(
            f"The requests of {trace.name} have no sessions, without which the policy session is least-load: use "
            "--trace chat, or JSON lines with a session_id."
        )
    if out is not None:
        check_output(out)
    if load is not None:
        if not trace.seconds:
            raise SpecError("--load needs a trace with several arrivals; pass --speed, or another --limit.")
        with SimulationProgress("measuring what round-robin can serve", min(len(trace.requests), SAMPLE)) as progress:
            speed = load * round_robin_capacity(trace, setup, progress.show) / (len(trace.requests) / trace.seconds)
    trace = trace.faster(speed)
    simulation = Simulation(trace, setup)
    began = perf_counter()
    with SimulationProgress("simulating", len(trace.requests)) as progress:
        simulation.run(lambda ended: progress.show(simulation))
    result = result_of(simulation, slo, perf_counter() - began, {"limit": limit, "speed": speed, "load": load})
    if as_json:
        print(json.dumps(result.document(), indent=2, allow_nan=False))
    else:
        _print(simulation, result)
    if out is not None:
        for path in write(out, simulation, result):
            print(f"wrote {path}", file=sys.stderr)


def _print(simulation: Simulation, result: Result) -> None:
    """A table on a terminal; else a line for each figure, however long."""
    setup = simulation.setup
    shown = [
        ("trace", f"{result.trace}, policy {setup.policy}, {len(simulation.replicas)} replicas"),
        ("model", f"{setup.latency.name}: {setup.latency.source}"),
        *rows(result),
    ]
    if not sys.stdout.isatty():
        for name, value in shown:
            print(f"{name:<12} {value}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in shown:
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)
