"""Configuration of a replica. Built by the `cluster` package from the spec; plain data, sent to each rank."""

from msgspec import Struct


class ReplicaConfig(Struct, frozen=True, kw_only=True):
    """One replica. None means: chosen by the worker, from the model and the machine, and reported at start."""

    replica_id: str
    generation: int = 1
    model: str  # the name that requests use
    source: str  # Hub id, folder, .gguf file, or the embedded "smollm2"
    revision: str | None = None
    role: str = "both"  # both | prefill | decode
    tp: int = 1
    pp: int = 1
    ep: bool = False  # experts split over the tp ranks, instead of each expert
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    load_format: str = "auto"  # auto | safetensors | gguf | dummy
    max_model_len: int | None = None
    kv_cache_memory: int | None = None  # bytes per rank
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_waiting: int = 4096  # requests queued at the replica before it refuses more
    async_scheduling: str = "auto"  # auto | on | off: plan a step while the previous one runs
    cuda_graphs: str = "full"  # full | off
    deterministic: bool = False  # a row's result does not depend on its batch, bit for bit, in 16-bit dtypes too
    profile_dir: str | None = None  # where profiles are written on request
    cpu_threads: int | None = None
    host: str = "127.0.0.1"  # the interface that the replica's gRPC server binds
    port: int = 0  # 0 = any free one
    secret: bytes
    trust_remote_code: bool = False
    defaults: dict[str, int | float] = {}  # of requests, by option; they override the model's own


class Rendezvous(Struct, frozen=True):
    """Rendezvous of a replica's ranks: two ports of one host, and a token of 32 random bytes that identifies them."""

    host: str
    store_port: int
    link_port: int
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
    kv_bytes: int
    block_size: int
    weight_bytes: int
    load_seconds: float
    defaults: dict[str, int | float] = {}  # of requests, the model's own included
    notes: list[str]  # sentences to show once: which kernels, what was chosen and why
