"""Operations on replicas in the admin API: their request bodies and handlers."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operators import Operators
from headrace_cluster.controller.profiles import Profiles
from headrace_worker.profiling.report import DEFAULT_SECONDS, DEFAULT_STEPS

MAX_DRAIN_SECONDS = 24 * 3600
SAVE_SECONDS = 2.0  # for Ray's GCS, until an operation responds without it


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProfileBody(_Body):
    """Of POST /profile; every field is optional."""

    replica: str | None = None
    steps: int = DEFAULT_STEPS
    seconds: float = DEFAULT_SECONDS


class RoleBody(_Body):
    """Of POST /role."""

    replica: str
    role: str


class DrainBody(_Body):
    """Of POST /drain. seconds: for requests in flight; none = the spec's value."""

    replica: str
    seconds: float | None = Field(default=None, ge=0, le=MAX_DRAIN_SECONDS, allow_inf_nan=False)
    force: bool = False


class RolloutBody(_Body):
    """Of POST /rollout. replicas: empty = all. seconds: as for a drain. allow_gap: even if none serves meanwhile."""

    replicas: list[str] = []
    seconds: float | None = Field(default=None, ge=0, le=MAX_DRAIN_SECONDS, allow_inf_nan=False)
    allow_gap: bool = False


class UndrainBody(_Body):
    """Of POST /undrain."""

    replica: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One POST: the response is the document of `run`, or the sentence of the HeadraceError that it raises."""

    path: str
    body: type[BaseModel]
    run: Callable[[Any], Awaitable[dict[str, Any]]]


class ExplainBody(_Body):
    """Of POST /explain. request: a request's id, or that of its answer."""

    request: str = Field(min_length=1, max_length=160)


def replica_operations(loop: ControlLoop, membership: Membership) -> list[Operation]:
    """What operators may do. Each responds at once, or as soon as it is done; the status shows the progress.

    `recorded`: the next controller would know of it; false if Ray's GCS has not saved it within SAVE_SECONDS.
    """
    operators, profiles = Operators(loop, membership), Profiles(loop)

    async def recorded(document: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                await loop.save()
        except Exception:  # it is repeated in the background
            return document | {"recorded": False}
        return document | {"recorded": True}

    async def profile(body: ProfileBody) -> dict[str, Any]:
        return await profiles.record(body.replica, body.steps, body.seconds)

    async def role(body: RoleBody) -> dict[str, Any]:
        return await recorded(await operators.change_role(body.replica, body.role))

    async def drain(body: DrainBody) -> dict[str, Any]:
        return await recorded(operators.drain(body.replica, body.seconds, force=body.force))

    async def rollout(body: RolloutBody) -> dict[str, Any]:
        return await recorded(operators.roll(body.replicas, body.seconds, allow_gap=body.allow_gap))

    async def undrain(body: UndrainBody) -> dict[str, Any]:
        return await recorded(operators.undrain(body.replica))

    async def explain(body: ExplainBody) -> dict[str, Any]:
        return await membership.explaining.explain(body.request)

    return [
        Operation("/profile", ProfileBody, profile),
        Operation("/role", RoleBody, role),
        Operation("/drain", DrainBody, drain),
        Operation("/rollout", RolloutBody, rollout),
        Operation("/undrain", UndrainBody, undrain),
        Operation("/explain", ExplainBody, explain),
    ]
