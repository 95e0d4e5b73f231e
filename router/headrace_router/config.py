"""The configuration of one router process. The cluster package builds it from the spec."""

import json
import re
import signal
import socket
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from headrace_base.logs import LogConfig
from headrace_base.settings import InternalTls, flag
from headrace_router.access.auth import AuthConfig
from headrace_router.access.tls_config import TlsConfig
from headrace_router.core.limits import Limits
from headrace_router.core.policy import PolicyName
from headrace_router.core.policy.interface import Mode

# To a router process: requests in flight end now, with an error. One signal: two of them may arrive in either order.
END_REQUESTS = signal.SIGUSR1


class StaticMember(BaseModel):
    """A replica that is always a member, for a router without a controller."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(description="host:port of the replica's gRPC server")
    replica_id: str = ""


def _with_hyphens(name: Any) -> Any:
    """SGLang, Dynamo and others write round_robin."""
    return name.lower().replace("_", "-") if isinstance(name, str) else name


# Names of policies that others have for what `predicted` does: SGLang, Dynamo, Ray Serve, the vLLM production stack.
_OTHER_POLICIES = ("cache-aware", "kv", "kvaware", "prefix-aware", "prefixaware", "power-of-two", "random")


def policy_hint(name: str) -> str:
    """What to use instead of another router's policy; empty for any other name."""
    if _with_hyphens(name) not in _OTHER_POLICIES:
        return ""
    return "predicted, the default, knows the KV caches and the load: leave --policy out"


def _header_name(name: Any) -> Any:
    return name.lower() if isinstance(name, str) else name


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,*?#]*")


def _origins(given: Any) -> Any:
    """A list, its JSON, or a text with commas; in lower case, as browsers send them. Raises ValueError."""
    origins = given
    if isinstance(given, str):
        origins = json.loads(given) if given.lstrip().startswith("[") else given.split(",")
    if not isinstance(origins, list | tuple) or not all(isinstance(origin, str) for origin in origins):
        return given
    found = tuple(name for origin in origins if (name := origin.strip().lower().removesuffix("/")))
    if wrong := next((name for name in found if not _ORIGIN.fullmatch(name)), None):
        raise ValueError(
            f"{wrong[:80]!r} is no origin: write it like https://chat.example.com, without a path; * = all"
        )
    return found


class RouterSettings(BaseModel):
    """The settings that routers receive as they are: the only declaration of each; the spec of routers inherits it."""

    policy: Annotated[PolicyName, BeforeValidator(_with_hyphens)] = Field(
        default="predicted",
        description="how a request's replica is chosen",
        json_schema_extra=flag("--policy"),
    )
    session_header: Annotated[str, BeforeValidator(_header_name)] = Field(
        default="x-session-id",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$",
        description="header, or gRPC metadata, that names a request's session",
        json_schema_extra=flag("--session-header"),
    )
    migration_limit: int = Field(
        default=1,
        ge=0,
        description="lost replicas after which a request continues on another one",
        json_schema_extra=flag("--migration-limit"),
    )
    disaggregation: Mode = Field(
        default="shared",
        description="prefill replicas compute prompts where that is faster (shared: and answer), or all prompts",
        json_schema_extra=flag("--disaggregation"),
    )
    rebalancing: bool = Field(
        default=True,
        description="move streams from replicas short of memory or time to replicas with capacity",
        json_schema_extra=flag("--rebalancing", values="on|off"),
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="unknown fields of a request; ignored ones are listed in a header",
        json_schema_extra=flag(
            "--unknown-fields", help="fields of requests that no table has; ignored ones are listed in a header"
        ),
    )
    reasoning_field: Literal["reasoning_content", "reasoning"] = Field(
        default="reasoning_content",
        description="the field of a chat's answer that has the model's reasoning",
        json_schema_extra=flag("--reasoning-field"),
    )
    volatile_blocks: Literal["strip", "keep"] = Field(
        default="strip",
        description="what agents put at the start of a system prompt that changes with each request, as Claude Code's "
        "billing header does: all that follows would be computed again",
        json_schema_extra=flag(
            "--volatile-blocks", help="text at the start of system prompts that changes with each request"
        ),
    )
    allowed_origins: Annotated[
        tuple[str, ...], BeforeValidator(_origins, json_schema_input_type=tuple[str, ...] | str)
    ] = Field(
        default=(),
        description="pages of a browser that may call the HTTP API (CORS), such as https://chat.example.com; * = all",
        json_schema_extra=flag(
            "--allowed-origins",
            values="ORIGINS",
            help="pages of a browser that may call the HTTP API (CORS): https://chat.example.com,http://…; * = all",
        ),
    )
    keep_alive_seconds: float = Field(
        default=15, gt=0, description="seconds without a token after which a comment is sent on a stream"
    )
    leave_seconds: float = Field(
        default=0,
        ge=0,
        description="that it still serves after the signal to stop, while load balancers learn that it is not ready",
        json_schema_extra=flag("--leave-seconds", help="time that it serves, not ready, before it stops"),
    )
    shutdown_seconds: float = Field(
        default=5,
        ge=0,
        description="for requests in flight when it stops",
        json_schema_extra=flag("--shutdown-seconds", help="time for requests in flight when it stops"),
    )


class RouterConfig(RouterSettings):
    """One router process. Port 0 means any free one; the router reports its real ports to the controller."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    grpc_port: int | None = Field(default=8001, ge=0, le=65535, description="none = no gRPC API")
    share_port: bool = Field(default=False, description="other routers listen on the same two ports (SO_REUSEPORT)")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="of this router alone: /metrics and /health; none = only on `port`"
    )
    metrics_host: str | None = Field(default=None, description="interface of `metrics_port`; none = `host`")
    metrics_no_auth: bool = Field(default=False, description="`metrics_port` answers without a key")
    controller: str | None = Field(default=None, description="host:port of headrace.v1.Control; none = only `members`")
    members: tuple[StaticMember, ...] = ()
    secret_file: Path = Field(description="of the cluster")
    internal_tls: InternalTls | None = None
    router_id: str = Field(default_factory=lambda: f"router-{token_hex(8)}", description="of one start of the process")
    node: str = Field(default_factory=socket.gethostname)
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    limits: Limits = Limits()
    prefix_index_blocks: int = Field(
        default=16 << 20, ge=1 << 14, description="KV blocks of all replicas that are indexed; 12 bytes of memory each"
    )
    max_attempts: int = Field(default=3, ge=1, description="replicas tried for one choice")
    migration_patience_seconds: float = Field(
        default=60.0, ge=0, description="that a stream waits for a replica when none is ready"
    )
    stall_seconds: float = Field(
        default=30.0, gt=0, description="without heartbeat until a stalled replica counts as lost"
    )
    logs: LogConfig = LogConfig(part="router")

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.share_port and 0 in (self.port, self.grpc_port):
            raise ValueError("routers that share their ports need port numbers: port 0 is a different one for each")
        if self.metrics_no_auth and self.metrics_port is None:
            raise ValueError("metrics_no_auth needs a separate address for metrics: set metrics_port")
        return self
