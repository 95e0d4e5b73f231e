"""What the admin API may be told to do with a replica: the bodies, and who carries them out."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace_cluster.controller.supervisor import Supervisor
from headrace_worker.profiling import DEFAULT_SECONDS, DEFAULT_STEPS

MAX_DRAIN_SECONDS = 24 * 3600


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProfileBody(_Body):
    """Of POST /profile; nothing of it has to be given."""

    replica: str | None = None
    steps: int = DEFAULT_STEPS
    seconds: float = DEFAULT_SECONDS


class RoleBody(_Body):
    """Of POST /role."""

    replica: str
    role: str


class DrainBody(_Body):
    """Of POST /drain. seconds: for requests in flight; none = as the spec says."""

    replica: str
    seconds: float | None = Field(default=None, ge=0, le=MAX_DRAIN_SECONDS, allow_inf_nan=False)
    force: bool = False


class UndrainBody(_Body):
    """Of POST /undrain."""

    replica: str


@dataclass(frozen=True, slots=True)
class Order:
    """One POST: the answer is the document of `carry_out`, or the sentence of the HeadraceError that it raises."""

    path: str
    body: type[BaseModel]
    carry_out: Callable[[Any], Awaitable[dict[str, Any]]]


def replica_orders(supervisor: Supervisor) -> list[Order]:
    """All that can be asked of a supervisor. A drain goes on after its answer: status tells how far it is."""

    async def profile(body: ProfileBody) -> dict[str, Any]:
        return await supervisor.profile(body.replica, body.steps, body.seconds)

    async def role(body: RoleBody) -> dict[str, Any]:
        return await supervisor.roles.flip(body.replica, body.role)

    async def drain(body: DrainBody) -> dict[str, Any]:
        return supervisor.drains.begin(body.replica, body.seconds, force=body.force)

    async def undrain(body: UndrainBody) -> dict[str, Any]:
        return supervisor.drains.end(body.replica)

    return [
        Order("/profile", ProfileBody, profile),
        Order("/role", RoleBody, role),
        Order("/drain", DrainBody, drain),
        Order("/undrain", UndrainBody, undrain),
    ]
