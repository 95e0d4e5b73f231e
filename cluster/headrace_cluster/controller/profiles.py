"""Records profiles of running replicas on demand."""

from typing import Any

from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.status import profile_document
from headrace_cluster.core.build import Build, State
from headrace_cluster.errors import ProfileError


class Profiles:
    """For one event loop."""

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop

    async def record(self, replica_id: str | None, steps: int, seconds: float) -> dict[str, Any]:
        """Records the next steps of every rank of a replica (None: of the only one).

        Returns the document of POST /profile, with the paths of the traces. Raises ProfileError.
        """
        build = self._chosen(replica_id)
        outcomes = await self._loop.driver.profile(build.name, steps, seconds)
        if not any(outcome.report is not None for outcome in outcomes):
            raise ProfileError(next((outcome.error for outcome in outcomes), f"{build.replica_id} has just ended"))
        return profile_document(build, outcomes)

    def _chosen(self, replica_id: str | None) -> Build:
        planner = self._loop.planner
        if replica_id is None and len(planner.wanted) != 1:
            raise ProfileError(f"which replica? Name one of: {', '.join(planner.wanted)}")
        name = replica_id or next(iter(planner.wanted))
        if name not in planner.wanted:
            raise ProfileError(f"there is no replica {name!r}; there are: {', '.join(planner.wanted)}")
        build = planner.current(name)
        if build is None or build.started is None:
            raise ProfileError(f"{name} is {build.state if build else State.DEAD}: ask again when it is ready")
        return build
