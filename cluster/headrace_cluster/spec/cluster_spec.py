"""The cluster spec: one model behind the flags of `headrace serve`, a YAML file and the Helm chart."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from headrace_base.settings import flag
from headrace_cluster.errors import SpecError
from headrace_cluster.program import program_name
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_cluster.spec.process_specs import (
    AdminSpec,
    ControlSpec,
    HealthSpec,
    InternalSpec,
    LogsSpec,
    RaySpec,
    RoutersSpec,
)
from headrace_cluster.spec.section import Section, reason
from headrace_router.access.auth import AuthConfig
from headrace_router.access.tls_config import TlsConfig
from headrace_router.config import policy_hint
from headrace_router.core.limits import Limits


class ClusterSpec(Section):
    """Everything that `headrace serve` runs."""

    cluster: str = Field(
        default="headrace",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="name in Ray",
        json_schema_extra=flag("--cluster", help="name of the cluster in Ray"),
    )
    models: tuple[ModelSpec, ...] = Field(default=(ModelSpec(),), min_length=1)
    routers: RoutersSpec = RoutersSpec()
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    limits: Limits = Limits()
    admin: AdminSpec = AdminSpec()
    control: ControlSpec = ControlSpec()
    internal: InternalSpec = InternalSpec()
    health: HealthSpec = HealthSpec()
    ray: RaySpec = RaySpec()
    logs: LogsSpec = LogsSpec()

    @property
    def metrics_host(self) -> str:
        """Interface of the routers' own addresses. Without a key it is loopback unless it is configured."""
        return self.routers.metrics_host or ("127.0.0.1" if self.routers.metrics_no_auth else self.routers.host)

    @property
    def metrics_ports(self) -> tuple[int, ...]:
        """Port of each router's own address, 0 = any free one; empty when they have none."""
        routers = self.routers
        configured = routers.metrics_no_auth or routers.metrics_host is not None or routers.metrics_port is not None
        configured |= self.tls.client_ca is not None  # probes of health have no client certificate
        if routers.count == 1 and not configured:
            return ()
        first = self._first_metrics_port() if routers.metrics_port is None else routers.metrics_port
        return tuple(first + index if first else 0 for index in range(routers.count))

    def _first_metrics_port(self) -> int:
        """The first port above the admin port such that the range contains no other port of this cluster."""
        first = self.admin.port and self.admin.port + 1
        others = (self.routers.port, self.routers.grpc_port, self.control.port or 0)
        while first and (taken := [port for port in others if first <= port < first + self.routers.count]):
            first = max(taken) + 1
        return first

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"each model needs a name of its own, but '{twice[0]}' is given twice")
        own = self.metrics_ports
        if max(own, default=0) > 65535:
            raise ValueError(f"routers.metrics_port is {own[0]}, and {len(own)} routers need that many above it")
        ports = [self.routers.port, self.routers.grpc_port, self.admin.port, self.control.port, *own]
        same = sorted({port for port in ports if port and ports.count(port) > 1})
        if same:
            raise ValueError(
                f"port {same[0]} is given twice: routers, metrics, admin and control need ports of their own"
            )
        return self


def parse_spec(data: dict[str, Any], origins: Mapping[tuple[str | int, ...], str] | None = None) -> ClusterSpec:
    """Validates plain data. Raises SpecError with one sentence per wrong field.

    origins: by path in the data, the flag or the variable that a value came from; the sentence names it.
    """
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        entries = error.errors(include_url=False)
        # pydantic also reports a list whose only entry is wrong as too short.
        real = [entry for entry in entries if entry["type"] != "too_short"] or entries
        raise SpecError("; ".join(_sentence(entry, origins or {}) for entry in real)) from error


def _sentence(entry: Any, origins: Mapping[tuple[str | int, ...], str]) -> str:
    loc = entry["loc"]
    if entry["type"] == "extra_forbidden":
        return f"unknown key '{_place(loc)}' (see `{program_name()} config schema`)"
    if not loc:
        return reason(entry)
    length = next((length for length in range(len(loc), 0, -1) if loc[:length] in origins), 0)
    parts = [origins[loc[:length]]] if length else []
    parts += [_place(loc[length:])] if length < len(loc) else []
    # Keys and secrets must not appear in an error message.
    shown = "" if "auth" in loc or isinstance(entry["input"], dict | list) else f", not {entry['input']!r}"
    hint = policy_hint(entry["input"]) if loc[-1] == "policy" and isinstance(entry["input"], str) else ""
    return f"{': '.join(parts)}: {reason(entry)}{shown}{hint and f'; {hint}'}"


def _place(loc: Sequence[str | int]) -> str:
    """'models[0].replicas'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
