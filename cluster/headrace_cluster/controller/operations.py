"""What operators may do: bodies of the admin API, refusals, and the words that go into the record."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_base.errors import HeadraceError
from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.status import profile_document
from headrace_cluster.core.replica_build import SERVING, Build, State
from headrace_cluster.core.wanted import (
    Wanted,
    base_models,
    differences,
    effective_spec,
    models_digest,
    pool_key,
    wanted_replicas,
)
from headrace_cluster.core.words import Changed, RoleWord, Roll, Words
from headrace_cluster.errors import ChangeError, DrainError, ProfileError, RoleError
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_cluster.spec.section import reason
from headrace_proto.role import UnknownRoleError, parse_role
from headrace_worker.profiling.report import DEFAULT_SECONDS, DEFAULT_STEPS

MAX_DRAIN_SECONDS = 24 * 3600
SAVE_SECONDS = 2.0  # for Ray's GCS, until an operation responds without it


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProfileBody(_Body):
    """The body of POST /profile; every field is optional."""

    replica: str | None = None
    steps: int = DEFAULT_STEPS
    seconds: float = DEFAULT_SECONDS


class RoleBody(_Body):
    """The body of POST /role."""

    replica: str
    role: str


class DrainBody(_Body):
    """The body of POST /drain. seconds: for requests in flight; None = the spec's value."""

    replica: str
    seconds: float | None = Field(default=None, ge=0, le=MAX_DRAIN_SECONDS, allow_inf_nan=False)
    force: bool = False


class RolloutBody(_Body):
    """The body of POST /rollout. replicas: empty = all. model: only the replicas of this model. seconds: as for /drain.

    allow_gap: even if no replica serves meanwhile. settings: new values of the model's keys.
    """

    replicas: list[str] = []
    model: str | None = None
    settings: dict[str, Any] = {}
    seconds: float | None = Field(default=None, ge=0, le=MAX_DRAIN_SECONDS, allow_inf_nan=False)
    allow_gap: bool = False


class ScaleBody(_Body):
    """The body of POST /scale. pool: 'MODEL', or 'MODEL.prefill' and 'MODEL.decode'."""

    pool: str
    replicas: int = Field(ge=1, le=10_000)


class ApplyBody(_Body):
    """The body of POST /apply. models: as in a spec file. dry_run: only say what would change."""

    models: list[dict[str, Any]] = Field(min_length=1)
    dry_run: bool = False


class UndrainBody(_Body):
    """The body of POST /undrain."""

    replica: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One POST: the response is the document of `run`, or the sentence of the HeadraceError that it raises."""

    path: str
    body: type[BaseModel]
    run: Callable[[Any], Awaitable[dict[str, Any]]]


class ExplainBody(_Body):
    """The body of POST /explain. request: the id of a request, or of its answer."""

    request: str = Field(min_length=1, max_length=160)


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


ROLE_SECONDS = 6.0  # for a replica to report its new role


class Operators:
    """For one event loop. A document has the replica's id and the generation of its build now."""

    def __init__(
        self,
        loop: ControlLoop,
        membership: Membership,
        check: Callable[[ClusterSpec], ClusterSpec],
        check_room: Callable[[ClusterSpec], None],
    ) -> None:
        """check: of models that are applied or set; returns the spec with commits of the Hub. It blocks.

        check_room: of any change; raises a HeadraceError where it is known that there is no room for it.
        """
        self._loop = loop
        self._check = check
        self._check_room = check_room
        self._planner = loop.planner
        self._membership = membership
        self._role_lock = asyncio.Lock()

    def drain(self, replica_id: str, seconds: float | None = None, *, force: bool = False) -> dict[str, Any]:
        """The replica ends and stays down; a second call may shorten the time. Raises DrainError.

        seconds: for requests in flight; those that still run then move to other replicas. None = the spec's value.
        """
        wanted = self._find(replica_id, DrainError)
        if not wanted.drained:
            build = self._planner.current(replica_id)
            losing = build is not None and build.role.decodes and build.state in SERVING
            if losing and not force and not self._planner.another_answers(replica_id):
                if problem := self._unconnected_peer(replica_id):
                    raise DrainError(problem + self._unreached())
                raise DrainError(
                    f"without {replica_id} no ready replica of {wanted.model.name} could decode; bring up another "
                    "one first, or pass --force"
                )
        words, usual = self._loop.words, self._loop.spec.health.drain_seconds
        words.drained[replica_id] = words.drained.get(replica_id, usual) if seconds is None else seconds
        self._loop.rethink()
        return self._document(replica_id) | {"seconds": words.drained[replica_id]}

    def undrain(self, replica_id: str) -> dict[str, Any]:
        """The next build starts after the drained one has ended. Raises DrainError."""
        wanted = self._find(replica_id, DrainError)
        if not wanted.drained:
            raise DrainError(f"{replica_id} is {self._state(replica_id)}, not drained: there is nothing to bring back")
        del self._loop.words.drained[replica_id]
        self._planner.forget(replica_id)
        self._loop.rethink()
        return self._document(replica_id)

    async def roll(self, body: RolloutBody) -> dict[str, Any]:
        """Builds replicas again, one of a model at a time, the new build first.

        Raises DrainError, ChangeError, and what `check` raises of a model with other settings.
        """
        if body.settings:
            words = msgspec.structs.replace(self._loop.words, settings=self._settings(body))
            self._compared(words)
            await asyncio.to_thread(self._check, self._changed_model(body, words))
        wanted = self._planner.wanted
        for name in body.replicas:
            if self._find(name, DrainError).drained:
                raise DrainError(f"{name} is drained: bring it back with `{program_name()} undrain {name}`")
        self._check_model(body.model)
        chosen = [
            name
            for name in body.replicas or wanted
            if not wanted[name].drained and body.model in (None, wanted[name].model.name)
        ]
        if not chosen:
            raise DrainError(f"every replica is drained: bring one back with `{program_name()} undrain`")
        changes, before = self._set(body) if body.settings else ([], {})
        seconds = self._loop.spec.health.drain_seconds if body.seconds is None else body.seconds
        rolls = self._loop.words.rolls
        self._loop.rethink()  # with the settings
        wanted = self._planner.wanted
        for name in chosen:
            number = rolls[name].number + 1 if name in rolls else 1
            rolls[name] = Roll(number, seconds, wanted[name].plain, body.allow_gap)
            self._planner.forgive(name)
        self._loop.rethink()
        return {
            "replicas": {name: self._document(name)["generation"] for name in chosen},
            "drained": [] if body.replicas else [name for name in wanted if wanted[name].drained],
            "seconds": seconds,
            "changes": changes,
            "before": before,
        }

    def _settings(self, body: RolloutBody) -> dict[str, dict[str, Changed]]:
        """Those of all models, with new values of keys of one model, or of the only one. Raises ChangeError."""
        model, words = self._model_of(body), self._loop.words
        data = model.model_dump(mode="json")
        for key in body.settings:
            if key in ("replicas", "prefill", "decode"):
                raise ChangeError(f"{key} is changed with `{program_name()} scale`, not with --set")
            if key not in data or key == "name":
                near = get_close_matches(key, data, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ChangeError(
                    f"{key} cannot be set: {hint}`{program_name()} config schema` has the keys of a model"
                )
        set_now = {key: Changed(value, data[key]) for key, value in body.settings.items()}
        return words.settings | {model.name: words.settings.get(model.name, {}) | set_now}

    def _model_of(self, body: RolloutBody) -> ModelSpec:
        models = [m for m in base_models(self._loop.spec, self._loop.words) if body.model in (None, m.name)]
        if len(models) != 1 or body.replicas:
            raise ChangeError("--set is for all replicas of one model: name it with --model, and no replicas")
        return models[0]

    def _changed_model(self, body: RolloutBody, words: Words) -> ClusterSpec:
        """The spec with the model alone whose settings change."""
        spec, name = effective_spec(self._loop.spec, words), self._model_of(body).name
        return spec.model_copy(update={"models": tuple(model for model in spec.models if model.name == name)})

    def _set(self, body: RolloutBody) -> tuple[list[str], dict[str, Any]]:
        """Sets new values of keys of a model: what changes, and the values before. Raises ChangeError."""
        model, settings = self._model_of(body), self._settings(body)
        changes = self._compared(msgspec.structs.replace(self._loop.words, settings=settings))
        effective = {m.name: m for m in self._loop.effective.models}.get(model.name, model)
        before = effective.model_dump(mode="json")
        self._loop.words.settings = settings
        return changes, {key: before[key] for key in body.settings}

    def scale(self, pool: str, replicas: int) -> dict[str, Any]:
        """Another number of replicas of a pool. Raises ChangeError."""
        known: dict[str, int] = {}
        for model in base_models(self._loop.spec, self._loop.words):
            known |= {pool_key(model, each.role): each.replicas for each in model.pools}
        if pool not in known:
            raise ChangeError(f"there is no model or pool {pool!r}; there are: {', '.join(known)}")
        words = self._loop.words
        scales = words.scales | {pool: Changed(replicas, known[pool])}
        changes = self._compared(msgspec.structs.replace(words, scales=scales))
        words.scales = scales
        self._loop.rethink()
        return {"changes": changes, "models": [pool.partition(".")[0] if pool not in self._names() else pool]}

    async def apply(self, models: list[dict[str, Any]], *, dry_run: bool = False) -> dict[str, Any]:
        """Other models, until those of the spec file change. Raises ChangeError, SpecError, and what `check` raises."""
        spec, words = self._loop.spec, self._loop.words
        found = spec.model_copy(update={"models": parse_spec({"models": models}).models})
        checked = await asyncio.to_thread(self._check, found)
        applied = Changed([model.model_dump(mode="json") for model in checked.models], models_digest(spec.models))
        new = msgspec.structs.replace(words, models=applied, settings={}, scales={})
        before = self._names()
        changes = self._compared(new)
        if not dry_run:
            words.models, words.settings, words.scales = applied, {}, {}
            self._loop.rethink()
        return {"changes": changes, "models": sorted(before | self._names())}

    def _names(self) -> set[str]:
        return {model.name for model in self._loop.effective.models}

    def _compared(self, words: Words) -> list[str]:
        """What these words would change. Raises ChangeError if they do not fit together."""
        try:
            new = effective_spec(self._loop.spec, words)
        except ValidationError as error:
            entry = error.errors(include_url=False)[0]
            place = ".".join(map(str, entry["loc"]))
            raise ChangeError(f"{place}: {reason(entry)}".removeprefix(": ")) from error
        self._check_room(new)
        self._check_drained(new, words)
        return differences(self._loop.effective.models, new.models)

    def _check_drained(self, spec: ClusterSpec, words: Words) -> None:
        """Raises ChangeError if a model that can answer would have only drained replicas."""
        answering = {
            each.model.name for each in self._planner.wanted.values() if each.role.decodes and not each.drained
        }
        left: dict[str, list[Wanted]] = {}
        for each in wanted_replicas(spec, words, self._loop.driver.digest).values():
            if each.role.decodes:
                left.setdefault(each.model.name, []).append(each)
        for model, replicas in left.items():
            if model in answering and all(each.drained for each in replicas):
                names = " ".join(each.replica_id for each in replicas)
                raise ChangeError(
                    f"this would leave {model} with drained replicas alone: bring {names} back first, with "
                    f"`{program_name()} undrain {replicas[0].replica_id}`"
                )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names():
            raise ChangeError(f"there is no model {name!r}; there are: {', '.join(sorted(self._names()))}")

    async def change_role(self, replica_id: str, new_role: str) -> dict[str, Any]:
        """Another role, in place; returns once the replica and the member list have it. Raises RoleError."""
        began = time.monotonic()
        async with self._role_lock:
            wanted = self._find(replica_id, RoleError)
            try:
                role = parse_role(new_role)
            except UnknownRoleError as error:
                raise RoleError(str(error)) from None
            build = self._planner.current(replica_id)
            if build is None or not build.serves or wanted.drained:
                raise RoleError(f"{replica_id} is {self._state(replica_id)}: its role can be changed while it is ready")
            if len(self._planner.builds_of(replica_id)) > 1:
                raise RoleError(f"{replica_id} is being rolled: its role can be changed when that is done")
            if not role.decodes and not self._planner.another_answers(replica_id):
                raise RoleError(
                    self._unconnected_peer(replica_id)
                    or f"{replica_id} is the only ready replica of {wanted.model.name} that can decode: as {role} it "
                    "would leave no replica to serve requests; give another one the role decode or both first"
                )
            roles, before = self._loop.words.roles, self._loop.words.roles.get(replica_id)
            roles[replica_id] = RoleWord(str(role), str(wanted.spec_role))
            self._loop.rethink()
            try:
                async with asyncio.timeout(ROLE_SECONDS):
                    await self._loop.until(lambda: build.reports[0].role == role == build.role)
            except TimeoutError:
                if before is None:
                    del roles[replica_id]
                else:
                    roles[replica_id] = before
                self._loop.rethink()
                raise RoleError(f"{replica_id} does not answer: its role stays as it was") from None
        seconds = round(time.monotonic() - began, 4)
        return self._document(replica_id) | {"role": role, "before": wanted.role, "seconds": seconds}

    def _find(self, replica_id: str, error: type[HeadraceError]) -> Wanted:
        wanted = self._planner.wanted
        if replica_id not in wanted:
            raise error(f"there is no replica {replica_id!r}; there are: {', '.join(wanted)}")
        return wanted[replica_id]

    def _document(self, replica_id: str) -> dict[str, Any]:
        build = self._planner.current(replica_id)
        return {"id": replica_id, "generation": build.name.generation if build is not None else 0}

    def _state(self, replica_id: str) -> State:
        build = self._planner.current(replica_id)
        if self._planner.wanted[replica_id].drained and build is None:
            return State.DRAINED
        return build.state if build is not None else State.DEAD

    def _unconnected_peer(self, replica_id: str) -> str:
        """A sentence if another replica can take the requests as soon as routers are connected to it; else empty."""
        if self._planner.another_answers(replica_id):
            return ""
        for name in self._planner.peers(replica_id):
            if any(build.serves and build.role.decodes for build in self._planner.builds_of(name)):
                return f"not every router is connected to {name} yet; try again in a few seconds"
        return ""

    def _unreached(self) -> str:
        """The end of a sentence: routers to which a replica cannot be connected."""
        return "".join(f"; {sentence}" for sentence in self._membership.unreached.values())


def replica_operations(
    loop: ControlLoop,
    membership: Membership,
    check: Callable[[ClusterSpec], ClusterSpec] = lambda spec: spec,
    check_room: Callable[[ClusterSpec], None] = lambda spec: None,
) -> list[Operation]:
    """What operators may do. Each responds at once, or as soon as it is done; the status shows the progress.

    check, check_room: see Operators. `recorded`: the next controller would know of it; false if Ray's GCS has not
    saved it within SAVE_SECONDS.
    """
    operators, profiles = Operators(loop, membership, check, check_room), Profiles(loop)

    async def recorded(document: dict[str, Any], *, changes: bool = True) -> dict[str, Any]:
        if changes:
            loop.words.lost = 0  # an operator has looked
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
        return await recorded(await operators.roll(body))

    async def scale(body: ScaleBody) -> dict[str, Any]:
        return await recorded(operators.scale(body.pool, body.replicas))

    async def apply(body: ApplyBody) -> dict[str, Any]:
        document = await operators.apply(body.models, dry_run=body.dry_run)
        return await recorded(document, changes=not body.dry_run)

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
        Operation("/scale", ScaleBody, scale),
        Operation("/apply", ApplyBody, apply),
        Operation("/explain", ExplainBody, explain),
    ]
