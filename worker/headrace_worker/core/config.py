"""Configuration of a replica. Built by the `cluster` package from the spec; plain data, sent to each rank."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from headrace_base.settings import InternalTls, flag
from headrace_proto.parsers import ReasoningParser, ToolParser
from headrace_proto.role import Role

LOCAL_CACHE_KEY = bytes(32)  # key of the block hash, where no other process uses the cache
EMBEDDED_MODEL = "smollm2"  # the source that needs no files and no network
DtypeName = Literal["float32", "bfloat16", "float16"]
WeightFormat = Literal["safetensors", "gguf", "dummy"]
LoadFormat = Literal["auto", WeightFormat]


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """The settings of a model that its ranks receive as they are: the only declaration of each.

    The spec of a model has the same fields (`headrace_cluster.spec.model_spec`), checked there by what `Field` says.
    None means: chosen by the worker, from the model and the machine, and reported at start.
    """

    revision: Annotated[
        str | None,
        Field(
            description="of the Hub repository",
            json_schema_extra=flag("--revision", help="branch, tag or commit of the Hub repository"),
        ),
    ] = None
    tp: Annotated[
        int, Field(ge=1, le=1024, description="ranks that share each layer", json_schema_extra=flag("--tp"))
    ] = 1
    pp: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="stages, one after the other",
            json_schema_extra=flag("--pp", help="pipeline stages"),
        ),
    ] = 1
    ep: Annotated[
        bool,
        Field(
            description="each of the tp ranks has whole experts, instead of a part of each",
            json_schema_extra=flag("--ep"),
        ),
    ] = False
    dtype: Annotated[
        Literal["auto", DtypeName],
        Field(
            description="of weights and KV cache",
            json_schema_extra=flag("--dtype", help="format of weights and KV cache"),
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Field(
            description="of keys and values, with a scale for each token and head; auto: that of the model",
            json_schema_extra=flag("--kv-cache-dtype", values="auto|fp8|int8", help="format of keys and values"),
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Field(
            description="of the weights; dummy: random ones",
            json_schema_extra=flag("--load-format", help="format of the files; dummy: random weights"),
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Field(ge=1, description="prompt + output tokens of one request", json_schema_extra=flag("--max-model-len")),
    ] = None
    block_size: Annotated[
        int,
        Field(ge=1, le=1024, description="tokens per KV-cache block", json_schema_extra=flag("--block-size")),
    ] = 16
    max_num_seqs: Annotated[
        int | None,
        Field(
            ge=1,
            description="requests that run at a time in one replica",
            json_schema_extra=flag("--max-num-seqs"),
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Field(ge=1, description="tokens of one step", json_schema_extra=flag("--max-num-batched-tokens"))
    ] = None
    state_snapshots: Annotated[
        int | None,
        Field(
            ge=0,
            description="states that the prefix cache of a model with recurrent layers keeps at least; "
            "none = as many as have memory",
            json_schema_extra=flag("--state-snapshots", help="recurrent states that the prefix cache keeps"),
        ),
    ] = None
    max_waiting: Annotated[int, Field(ge=1, description="requests queued at a replica before it rejects more")] = 4096
    cpu_threads: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="of one rank; none = cores / ranks on a node",
            json_schema_extra=flag("--cpu-threads", help="threads of one rank; without: cores / ranks on a node"),
        ),
    ] = None
    quantization: Annotated[
        Literal["fp8", "int8"] | None,
        Field(
            description="of linears and experts while an unquantized checkpoint is loaded: fp8 (on GPUs products of "
            "8-bit numbers), or int8 in groups of 32",
            json_schema_extra=flag(
                "--quantization",
                values="fp8|int8",
                help="round linears and experts to 8 bits while loading",
            ),
        ),
    ] = None
    cpu_arithmetic: Annotated[
        Literal["exact", "bf16"],
        Field(
            description="of products on CPUs in float32; bf16: inputs and dense weights are rounded to bfloat16, "
            "faster for many tokens where the CPU has AVX512_BF16, slower elsewhere",
            json_schema_extra=flag(
                "--cpu-arithmetic",
                help="products on CPUs; bf16: inputs rounded to bfloat16, faster for many tokens with AVX512_BF16",
            ),
        ),
    ] = "exact"
    rank_interface: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=64,
            description="network interface for traffic between ranks: a name, or a network such as 10.1.0.0/16; none = "
            "that of the node's address",
            json_schema_extra=flag(
                "--rank-interface", values="NETWORK", help="network of traffic between ranks; without: the node's"
            ),
        ),
    ] = None
    kv_transfer: Annotated[
        str,
        Field(
            pattern=r"^\w+(:[\w.:,-]+)?$",
            description="how KV blocks move between replicas: a backend of NIXL, and after a colon the network devices "
            "that it may use, with commas between; none = all",
            json_schema_extra=flag(
                "--kv-transfer",
                values="BACKEND[:DEVICES]",
                help="how KV blocks move: ucx, or for example ucx:mlx5_0:1",
            ),
        ),
    ] = "ucx"
    async_scheduling: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="plan a step while the one before it runs; auto: on GPUs",
            json_schema_extra=flag("--async-scheduling"),
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["full", "off"],
        Field(description="replay whole steps on GPUs", json_schema_extra=flag("--cuda-graphs")),
    ] = "full"
    deterministic: Annotated[
        bool,
        Field(
            description="a request's bits do not depend on the batch; slower",
            json_schema_extra=flag("--deterministic"),
        ),
    ] = False
    tool_parser: Annotated[
        ToolParser,
        Field(
            description="how the model writes calls of tools; auto: as its chat template says",
            json_schema_extra=flag("--tool-parser", values="NAME", help="how the model writes calls of tools"),
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Field(
            description="how the model writes its reasoning; auto: as its chat template says",
            json_schema_extra=flag("--reasoning-parser", values="NAME", help="how the model writes its reasoning"),
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        Field(
            description="run Python code that comes with the model",
            json_schema_extra=flag("--trust-remote-code"),
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ReplicaSettings):
    """One replica: its settings, and what is derived from the spec and the machine."""

    replica_id: str
    generation: int = 1
    model: str  # the name that requests use
    source: str  # Hub id, folder, .gguf file, or the embedded "smollm2"
    role: Role = Role.BOTH
    device: str = "auto"  # auto | cpu | cuda, or cuda:N for one rank
    kv_cache_memory: int | None = None  # bytes per rank
    kv_offload_memory: int | None = None  # bytes of host memory per rank; None: evicted blocks are gone
    kv_offload_dir: str | None = None  # a folder of each node for the same blocks
    kv_offload_dir_size: int | None = None  # bytes per rank; None: four times those of host memory
    profile_dir: str | None = None  # where profiles are written on request
    host: str = "127.0.0.1"  # the interface that the replica's gRPC server binds
    port_range: tuple[int, int] | None = None  # first and last that its server may take; None = any free one
    defaults: dict[str, int | float] = field(default_factory=dict)  # request defaults, which override the model's
    chat_template: str | None = None  # path of a file, instead of the model's own
    internal_tls: InternalTls | None = None  # TLS files for gRPC between processes of the cluster


class Rendezvous(Struct, frozen=True):
    """Rendezvous of a replica's ranks: a port of rank 0's host, and 32 random bytes that only the ranks know."""

    host: str
    port: int
    token: bytes


class ReplicaStarted(Struct, frozen=True, kw_only=True):
    """Facts about a replica once it is ready."""

    model: str = ""  # the name that requests use
    address: str  # host:port of headrace.v1.Replica
    boot_id: bytes
    pid: int
    device: str  # "cpu", "cuda:0"
    dtype: str
    revision: str
    threads: int
    tp: int = 1
    pp: int = 1
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    kv_tokens: int = 0  # that the blocks hold
    kv_bytes: int
    block_size: int
    weight_bytes: int
    defaults: dict[str, int | float] = {}  # request defaults, the model's included
    warnings: list[str] = []  # sentences about what makes it slower than it could be here, or how its files are taken
    notes: list[str]  # sentences to show on request: which kernels, what was chosen and why
