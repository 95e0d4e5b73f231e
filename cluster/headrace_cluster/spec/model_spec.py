"""One model of the spec, its pools, and how its replicas are built."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from headrace_base.settings import flag
from headrace_cluster.spec.section import Bytes, Count, NodeLabels, PortRange, Section, json_object
from headrace_proto.role import Role
from headrace_router.core.sampling_options import SamplingOptions
from headrace_worker.core.config import EMBEDDED_MODEL, ReplicaSettings


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one role and one shape."""

    role: Role
    replicas: int
    tp: int
    pp: int
    node_labels: Mapping[str, str] = field(default_factory=dict)  # labels of the nodes where the pool's ranks run

    @property
    def ranks(self) -> int:
        """Actors of the whole pool."""
        return self.replicas * self.tp * self.pp


_DEFAULTS = '{"max_tokens": 512, "temperature": 0.2}'
_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._/:-]{0,126}[A-Za-z0-9])?$"
_ALIAS = r"^[A-Za-z0-9*]([A-Za-z0-9._/:*-]{0,126}[A-Za-z0-9*])?$"


def default_name(source: str) -> str:
    """The model name in requests if none is configured: a Hub id is kept, a path is reduced to its last part."""
    name = source
    if source.endswith(".gguf") or source.startswith(("/", "./", "../", "~")) or Path(source).is_dir():
        path = Path(source).expanduser()
        split = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")  # a part of a GGUF model in several files
        name = split.sub("", path.stem) if path.suffix == ".gguf" else path.resolve().name
    cleaned = re.sub(r"[^A-Za-z0-9._/:-]+", "-", name).strip("._/:-")[:128]
    return cleaned or "model"


class PoolSpec(Section):
    """Replicas of one role. tp and pp default to the model's."""

    replicas: Count = Field(
        default=1,
        json_schema_extra=flag("--{pool}", help="replicas of the {pool} pool; the pools come in pairs"),
    )
    tp: Count | None = Field(
        default=None,
        description="ranks that share each layer; none = the model's",
        json_schema_extra=flag("--{pool}-tp", help="--tp of the {pool} pool"),
    )
    pp: Count | None = Field(
        default=None,
        description="stages, one after the other; none = the model's",
        json_schema_extra=flag("--{pool}-pp", help="--pp of the {pool} pool"),
    )
    node_labels: NodeLabels | None = Field(
        default=None,
        description="labels of the nodes in Ray where the pool runs; none = the model's",
        json_schema_extra=flag(
            "--{pool}-node-labels", values="JSON", help="labels of the nodes in Ray for the {pool} pool"
        ),
    )


class DefaultsSpec(SamplingOptions):
    """Values for fields that a request does not set. None = the value in the model's files, else the API's default."""

    model_config = ConfigDict(frozen=True)


class ModelSpec(Section, ReplicaSettings):  # type: ignore[misc]  # frozen by its config, which mypy does not read
    """One model and how its replicas are built. A value of none is chosen by the worker and shown at start."""

    name: str = Field(
        default="",
        validate_default=True,
        pattern=_NAME,
        description="what requests call it; default: from the source",
        json_schema_extra=flag("--served-model-name"),
    )
    aliases: tuple[Annotated[str, Field(pattern=_ALIAS)], ...] = Field(
        default=(), description="further names for it; * is any text, as in claude-*"
    )
    source: str = Field(
        default=EMBEDDED_MODEL,
        min_length=1,
        description="Hub id, folder, .gguf file, or the embedded 'smollm2'",
        json_schema_extra=flag("MODEL"),
    )
    replicas: Count | None = Field(
        default=None,
        description="none = 1, or those of prefill and decode",
        json_schema_extra=flag("--replicas", help="copies of the model; 1 where there are no pools"),
    )
    prefill: PoolSpec | None = Field(default=None, description="replicas that only compute prompts; with decode")
    decode: PoolSpec | None = Field(default=None, description="replicas that decode; with prefill, instead of replicas")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where ranks compute", json_schema_extra=flag("--device")
    )
    kv_cache_memory: Bytes | None = Field(
        default=None,
        ge=1 << 20,
        description="per rank, e.g. 2GiB",
        json_schema_extra=flag("--kv-cache-memory", help="KV cache per rank, such as 2GiB"),
    )
    kv_offload_memory: Bytes | None = Field(
        default=None,
        ge=1 << 20,
        description="host memory per rank for KV blocks that the cache evicts, e.g. 8GiB; none: they are gone",
        json_schema_extra=flag("--kv-offload-memory", help="host memory per rank for evicted KV blocks, such as 8GiB"),
    )
    kv_offload_dir: str | None = Field(
        default=None,
        min_length=1,
        description="a folder on each node where the blocks in host memory are kept, too, also over restarts",
        json_schema_extra=flag("--kv-offload-dir", help="a folder that keeps evicted KV blocks over restarts"),
    )
    kv_offload_dir_size: Bytes | None = Field(
        default=None,
        ge=1 << 20,
        description="per rank, e.g. 100GiB; none: four times kv_offload_memory",
        json_schema_extra=flag(
            "--kv-offload-dir-size", help="bytes per rank in that folder; 4 times --kv-offload-memory"
        ),
    )
    cpu_share: float = Field(
        default=0.05,
        gt=0,
        le=1024,
        description="of Ray's CPUs that one rank on a CPU reserves",
        json_schema_extra=flag("--cpu-share", help="Ray CPUs that a rank on a CPU reserves"),
    )
    node_labels: NodeLabels = Field(
        default={},
        description="labels of the nodes in Ray where ranks run; none = any node",
        json_schema_extra=flag(
            "--node-labels", values="JSON", help='labels of the nodes in Ray where ranks run: {"gpu": "h100"}'
        ),
    )
    port_range: PortRange | None = Field(
        default=None,
        description="of the gRPC of its replicas, such as 20000-20100; none = any free port",
        json_schema_extra=flag(
            "--port-range", values="FIRST-LAST", help="ports of its replicas' gRPC, for a firewall; any free one"
        ),
    )
    profile: Path | None = Field(
        default=None,
        description="folder for profiles of steps, on the ranks' nodes",
        json_schema_extra=flag("--profile", help="folder for profiles, which the command profile records"),
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="file with a Jinja template instead of the model's own, on the ranks' nodes",
        json_schema_extra=flag("--chat-template", help="a Jinja file instead of the model's own chat template"),
    )
    defaults: Annotated[DefaultsSpec, BeforeValidator(partial(json_object, example=_DEFAULTS))] = Field(
        default=DefaultsSpec(),
        description="for requests that do not set max_tokens, temperature and so on",
        json_schema_extra=flag(
            "--defaults", values="JSON", help='for requests that leave it open: {"max_tokens": 512, …}'
        ),
    )

    @field_validator("quantization", mode="before")
    @classmethod
    def _online(cls, value: object) -> object:
        if value not in (None, "fp8", "int8"):
            raise ValueError(
                "fp8 and int8 round an unquantized checkpoint; the format of another is read from its config.json: "
                "leave it out"
            )
        return value

    @model_validator(mode="after")
    def _shared(self) -> Self:
        for pool in self.pools:
            if self.ep and pool.tp == 1:
                raise ValueError("ep splits the experts over the tp ranks, but tp is 1: raise tp, or leave ep out")
        if (self.kv_offload_dir or self.kv_offload_dir_size) and not (self.kv_offload_memory and self.kv_offload_dir):
            raise ValueError(
                "evicted KV blocks go to disk through host memory: give kv_offload_dir and kv_offload_memory"
            )
        if self.cpu_arithmetic == "bf16" and (self.dtype not in ("auto", "float32") or self.device == "cuda"):
            raise ValueError("cpu_arithmetic bf16 is for CPUs and dtype float32: leave it, dtype or device out")
        return self

    @property
    def ranks(self) -> int:
        """Actors of one replica of the model's own shape."""
        return self.tp * self.pp

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools in the order of replica ids: those that decode first."""
        if self.prefill is None or self.decode is None:
            return (Pool(Role.BOTH, self.replicas or 1, self.tp, self.pp, self.node_labels),)
        parts = ((Role.DECODE, self.decode), (Role.PREFILL, self.prefill))
        return tuple(
            Pool(
                role,
                part.replicas,
                part.tp or self.tp,
                part.pp or self.pp,
                self.node_labels if part.node_labels is None else part.node_labels,
            )
            for role, part in parts
        )

    def shaped(self, pool: Pool) -> Self:
        """The spec of one replica of a pool."""
        single = {"replicas": 1, "prefill": None, "decode": None, "tp": pool.tp, "pp": pool.pp}
        return self.model_copy(update=single | {"node_labels": pool.node_labels})

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
                "replicas is given beside prefill and decode: use --replicas N for replicas that do both, or "
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
