"""Messages on the terminal: the progress of a start, then changes of the cluster."""

import sys
from collections.abc import Sequence
from typing import Any, Literal

from headrace_base.errors import HeadraceError
from headrace_base.logs import LogFormat
from headrace_cluster.core.view import BUILT_AGAIN, ClusterView

_log: Any = None  # logger of a server process; client commands print sentences
_format: LogFormat | None = None  # format of the logger's lines


def use_log_format(format: LogFormat) -> None:
    """For a server process: from now on `show_message` logs, instead of printing after the command's name.

    A second call with the same format changes nothing.
    """
    global _log, _format
    if format == _format:
        return
    import structlog

    from headrace_base.logs import LogConfig, configure_logs

    configure_logs(LogConfig("serve", format=format))
    _log, _format = structlog.get_logger(), format


def show_message(sentence: str, level: Literal["info", "warning", "error"] = "info", **facts: Any) -> None:
    """Shows one line to the person who started this command."""
    if _log is not None:
        getattr(_log, level)(sentence, **facts)
    else:
        print(f"headrace: {sentence}", file=sys.stderr, flush=True)


def show_failure(error: Exception) -> None:
    """Why a server process ends: its sentence, or for an unexpected error one line, with the traceback in the log."""
    if isinstance(error, HeadraceError):
        show_message(str(error), "error")
    else:
        _log.error(f"unexpected {type(error).__name__}: {error}", exc_info=error)


class ClusterDisplay:
    """Shows the stages of a start, then failures and recoveries."""

    def __init__(self) -> None:
        self._stages: dict[str, tuple[str, int]] = {}
        self._unable: set[str] = set()
        self._failures: dict[str, str] = {}
        self._down: set[str] = set()  # replicas that have failed, until they are ready or not wanted
        self._problems: dict[str, str] = {}

    def show_stage(self, part: str, stage: str, fraction: float = 0.0) -> None:
        """A line for a new stage of a part, and for each tenth of a long stage. `fraction` is 0..1."""
        shown, tenths = self._stages.get(part, ("", 0)), int(fraction * 10)
        if shown[0] != stage:
            show_message(f"{part}: {stage}")
        elif shown[1] < tenths < 10:
            show_message(f"{part}: {stage}, {10 * tenths} %")
        self._stages[part] = (stage, tenths)

    def show_start(self, view: ClusterView) -> None:
        """While it starts."""
        for replica_id in view.unable.keys() - self._unable:
            show_message(view.unable[replica_id], "warning", replica=replica_id)
        self._unable = set(view.unable)
        for entry in view.progress:
            self.show_stage(entry.replica_id, entry.stage, entry.fraction)
        for replica_id in view.started.keys() - {entry.replica_id for entry in view.progress}:
            self.show_stage(replica_id, "ready")

    def show_changes(self, view: ClusterView) -> None:
        """Once it is ready."""
        for replica_id, cause in view.failures.items():
            if _without_countdown(self._failures.get(replica_id, "")) != _without_countdown(cause):
                show_message(cause, "info" if cause == BUILT_AGAIN else "warning", replica=replica_id)
        self._down |= view.failures.keys()
        for replica_id in sorted(self._down - view.failures.keys()):
            if replica_id in view.started:
                show_message("ready again", replica=replica_id)
            if replica_id in view.started or replica_id not in view.roles:
                self._down.remove(replica_id)
        self._failures = dict(view.failures)
        problems = _by_label(view.problems)
        for label, problem in problems.items():
            if label not in self._problems:
                show_message(problem, "warning")
        self._problems = problems


def _without_countdown(cause: str) -> str:
    return cause.partition("; next try in ")[0]


def _by_label(problems: Sequence[str]) -> dict[str, str]:
    """Problems by what they are about: their number of failures grows."""
    return {problem.partition(" failed")[0]: problem for problem in problems}
