"""The cluster spec: one model behind the flags of `headrace serve`, a YAML file and the Helm chart."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from headrace_cluster.errors import SpecError
from headrace_cluster.pools import Pool, Role
from headrace_cluster.sizes import parse_bytes
from headrace_router.auth import AuthConfig
from headrace_router.limits import Limits

EMBEDDED_MODEL = "smollm2"
_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._/:-]{0,126}[A-Za-z0-9])?$"


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes, json_schema_input_type=int | str)]
Port = Annotated[int, Field(ge=0, le=65535)]


def default_name(source: str) -> str:
    """The name that requests use when none is given: a Hub id stays, a path becomes its last part."""
    name = source
    if source.endswith(".gguf") or source.startswith(("/", "./", "../", "~")) or Path(source).is_dir():
        path = Path(source).expanduser()
        name = path.stem if path.suffix == ".gguf" else path.resolve().name
    cleaned = re.sub(r"[^A-Za-z0-9._/:-]+", "-", name).strip("._/:-")[:128]
    return cleaned or "model"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolSpec(_Section):
    """Replicas of one role. Without a shape of its own a pool has the model's."""

    replicas: int = Field(default=1, ge=1, le=1024)
    tp: int | None = Field(default=None, ge=1, le=1024, description="ranks that share each layer; none = the model's")
    pp: int | None = Field(default=None, ge=1, le=1024, description="stages, one after the other; none = the model's")


class ModelSpec(_Section):
    """One model and how its replicas are built. What is none is chosen by the worker, and said at start."""

    name: str = Field(
        default="", validate_default=True, pattern=_NAME, description="what requests call it; default: from the source"
    )
    aliases: tuple[Annotated[str, Field(pattern=_NAME)], ...] = Field(default=(), description="further names for it")
    source: str = Field(
        default=EMBEDDED_MODEL, min_length=1, description="Hub id, folder, .gguf file, or the embedded 'smollm2'"
    )
    revision: str | None = Field(default=None, description="of the Hub repository")
    replicas: int | None = Field(default=None, ge=1, le=1024, description="none = 1, or as prefill and decode say")
    prefill: PoolSpec | None = Field(default=None, description="replicas that only compute prompts; with decode")
    decode: PoolSpec | None = Field(default=None, description="replicas that answer; with prefill, instead of replicas")
    tp: int = Field(default=1, ge=1, le=1024, description="ranks that share each layer")
    pp: int = Field(default=1, ge=1, le=1024, description="stages, one after the other")
    ep: bool = Field(default=False, description="give each of the tp ranks whole experts, instead of a part of each")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1, description="prompt + output tokens of one request")
    kv_cache_memory: Bytes | None = Field(default=None, ge=1 << 20, description="per rank, e.g. 2GiB")
    block_size: int = Field(default=16, ge=1, le=1024, description="tokens per KV-cache block")
    max_num_seqs: int | None = Field(default=None, ge=1, description="requests that run at a time in one replica")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="tokens of one step")
    max_waiting: int = Field(default=4096, ge=1, description="requests queued at a replica before it refuses")
    cpu_threads: int | None = Field(
        default=None, ge=1, le=4096, description="of one rank; none = cores / ranks on a node"
    )
    cpu_share: float = Field(default=0.05, gt=0, le=1024, description="of Ray's CPUs that one rank on a CPU reserves")
    async_scheduling: Literal["auto", "on", "off"] = Field(
        default="auto", description="plan a step while the one before it runs; auto: on GPUs"
    )
    cuda_graphs: Literal["full", "off"] = Field(default="full", description="replay whole steps on GPUs")
    deterministic: bool = Field(default=False, description="a request's bits never depend on its neighbours; slower")
    profile: Path | None = Field(default=None, description="folder for profiles of steps, on the ranks' nodes")
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")

    @model_validator(mode="after")
    def _shared(self) -> Self:
        for pool in self.pools:
            if self.ep and pool.tp == 1:
                raise ValueError("ep splits the experts over the tp ranks, but tp is 1: raise tp, or leave ep out")
        return self

    @property
    def ranks(self) -> int:
        """Actors of one replica of the model's own shape."""
        return self.tp * self.pp

    @property
    def pools(self) -> tuple[Pool, ...]:
        """What is built, in the order of replica ids: those that answer first."""
        if self.prefill is None or self.decode is None:
            return (Pool(Role.BOTH, self.replicas or 1, self.tp, self.pp),)
        parts = ((Role.DECODE, self.decode), (Role.PREFILL, self.prefill))
        return tuple(Pool(role, part.replicas, part.tp or self.tp, part.pp or self.pp) for role, part in parts)

    def shaped(self, pool: Pool) -> Self:
        """The model as one replica of a pool is built."""
        single = {"replicas": 1, "prefill": None, "decode": None, "tp": pool.tp, "pp": pool.pp}
        return self.model_copy(update=single)

    @model_validator(mode="before")
    @classmethod
    def _pooled(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = [name for name in ("prefill", "decode") if data.get(name) is not None]
        if len(given) == 1:
            other = "decode" if given == ["prefill"] else "prefill"
            raise ValueError(f"{given[0]} is given without {other}: pools come in pairs (--prefill N --decode M)")
        if given and data.get("replicas") is not None:
            raise ValueError(
                "replicas is given beside prefill and decode: say --replicas N for replicas that do both, or "
                "--prefill N --decode M for two pools"
            )
        return data if given or data.get("replicas") is not None else data | {"replicas": 1}

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name"):
            source = data.get("source", EMBEDDED_MODEL)
            return data | {"name": default_name(source) if isinstance(source, str) else "model"}
        return data


class RoutersSpec(_Section):
    """Where clients connect."""

    host: str = Field(default="127.0.0.1", min_length=1, description="interface to listen on")
    port: Port = Field(default=8000, description="HTTP; 0 = any free port")
    grpc_port: Port = Field(default=8001, description="gRPC; 0 = any free port")
    count: int = Field(
        default=1, ge=1, le=64, description="router processes that share the two ports; limits count in each"
    )
    metrics_port: Port = Field(
        default=0, description="of the first of several routers, the next has the next one; 0 = any free ports"
    )
    policy: Literal["least-load", "round-robin"] = "least-load"
    migration_limit: int = Field(default=3, ge=0, description="times that a stream may move after its replica is lost")
    disaggregation: Literal["auto", "always", "off"] = Field(
        default="auto", description="have prefill replicas compute prompts: where that is predicted to pay, or all"
    )
    rebalancing: bool = Field(
        default=True, description="move streams from replicas short of memory or time to others with room"
    )
    keep_alive_seconds: float = Field(default=15, gt=0, description="of silence on a stream before a comment is sent")
    shutdown_seconds: float = Field(default=5, ge=0, description="for requests in flight after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = "warning"


class AdminSpec(_Section):
    """The admin API: status and stop. Always needs its key."""

    host: Literal["127.0.0.1", "::1", "localhost"] = "127.0.0.1"
    port: Port = Field(default=8002, description="0 = any free port")


class ControlSpec(_Section):
    """The controller's gRPC, for routers; guarded by the cluster's secret."""

    host: str | None = Field(
        default=None, min_length=1, description="default: loopback, or the Ray head in a joined Ray"
    )
    port: Port = Field(default=0, description="0 = any free port")
    secret_file: Path | None = Field(
        default=None, description="holds the cluster's secret (32 bytes or more, text or raw)"
    )


class HealthSpec(_Section):
    """How the controller judges replicas. Seconds."""

    start_seconds: float = Field(default=1800, gt=0, description="for a replica to load, warm up and be ready")
    interval_seconds: float = Field(default=0.5, gt=0, le=5, description="between two health messages")
    silence_seconds: float = Field(
        default=2, gt=0, description="without health message until a replica counts as unhealthy"
    )
    replace_seconds: float = Field(default=15, gt=0, description="that a replica is unhealthy before it is replaced")
    drain_seconds: float = Field(default=5, ge=0, description="for requests in flight when a replica is stopped")


class RaySpec(_Section):
    """The Ray cluster. Without an address one is started on this machine and ends with `serve`."""

    address: str | None = Field(default=None, description="host:port of a running Ray to join, or 'auto'")
    object_store_memory: Bytes = Field(default=100 << 20, ge=80 << 20, description="of a Ray that is started here")
    dashboard: bool = True
    dashboard_port: Port | None = Field(default=None, description="none = 8265, or the next that is free")


class ClusterSpec(_Section):
    """Everything that `headrace serve` runs."""

    cluster: str = Field(default="headrace", pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", description="name in Ray")
    models: tuple[ModelSpec, ...] = Field(default=(ModelSpec(),), min_length=1)
    routers: RoutersSpec = RoutersSpec()
    auth: AuthConfig = AuthConfig()
    limits: Limits = Limits()
    admin: AdminSpec = AdminSpec()
    control: ControlSpec = ControlSpec()
    health: HealthSpec = HealthSpec()
    ray: RaySpec = RaySpec()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"each model needs a name of its own, but '{twice[0]}' is given twice")
        ports = {"routers.port": self.routers.port, "routers.grpc_port": self.routers.grpc_port}
        ports |= {"admin.port": self.admin.port, "control.port": self.control.port}
        if self.routers.count > 1 and (first := self.routers.metrics_port):
            own = {
                f"routers.metrics_port + {n}" if n else "routers.metrics_port": first + n
                for n in range(self.routers.count)
            }
            if max(own.values()) > 65535:
                raise ValueError(
                    f"routers.metrics_port is {first}, and {self.routers.count} routers need that many above it"
                )
            ports |= own
        for field, port in ports.items():
            same = [other for other, value in ports.items() if port and value == port and other != field]
            if same:
                raise ValueError(f"{field} and {same[0]} are both {port}: each needs a port of its own")
        return self


def parse_spec(data: dict[str, Any]) -> ClusterSpec:
    """Validates plain data. Raises SpecError with one sentence per wrong field."""
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        entries = error.errors(include_url=False)
        # A list whose only entry is wrong is also reported as empty.
        real = [entry for entry in entries if entry["type"] != "too_short"] or entries
        raise SpecError("; ".join(_sentence(entry) for entry in real)) from error


def _sentence(entry: Any) -> str:
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in entry["loc"]).lstrip(".")
    if entry["type"] == "extra_forbidden":
        return f"unknown key '{field}' (see `headrace config schema`)"
    message = str(entry["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not field:
        return message
    # Keys and secrets must not show up in an error message.
    shown = "" if "auth" in entry["loc"] or isinstance(entry["input"], dict | list) else f", not {entry['input']!r}"
    return f"{field}: {message}{shown}"
