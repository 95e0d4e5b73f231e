"""What a cluster's changes look like on the terminal of the process that started it."""

from collections.abc import Sequence

from headrace_cluster.core.view import BUILT_AGAIN, View
from headrace_cluster.launch.display import StartDisplay, show_message


class ClusterDisplay:
    """Shows one view after another: stages until all is ready, then failures and recoveries."""

    def __init__(self) -> None:
        self._unable: set[str] = set()
        self._failures: dict[str, str] = {}
        self._problems: dict[str, str] = {}

    def show_start(self, view: View, display: StartDisplay) -> None:
        """While it starts."""
        for replica_id in view.unable.keys() - self._unable:
            show_message(view.unable[replica_id], "warning", replica=replica_id)
        self._unable = set(view.unable)
        for entry in view.progress:
            display.update(entry.replica_id, entry.stage, entry.fraction)
        for replica_id in view.started.keys() - {entry.replica_id for entry in view.progress}:
            display.update(replica_id, "ready", 1.0)

    def show_changes(self, view: View) -> None:
        """Once it is ready."""
        for replica_id, cause in view.failures.items():
            if _without_countdown(self._failures.get(replica_id, "")) != _without_countdown(cause):
                show_message(cause, "info" if cause == BUILT_AGAIN else "warning", replica=replica_id)
        for replica_id in self._failures.keys() - view.failures.keys():
            show_message("ready again", replica=replica_id)
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
