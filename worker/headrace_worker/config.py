"""How a replica is told what to be. Built by the cluster room from the spec; plain data, sent to each rank."""

from msgspec import Struct


class ReplicaConfig(Struct, frozen=True, kw_only=True):
    """One replica. None means: chosen by the worker, from the model and the machine, and said at start."""

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
    max_waiting: int = 4096  # requests queued at the replica before it refuses
    async_scheduling: str = "auto"  # auto | on | off: plan a step while the one before it runs
    cuda_graphs: str = "full"  # full | off
    deterministic: bool = False  # a row's bits do not depend on its batch, in 16-bit dtypes too
    profile_dir: str | None = None  # where profiles are written when one is asked for
    cpu_threads: int | None = None
    host: str = "127.0.0.1"  # the interface that the replica's gRPC server binds
    port: int = 0  # 0 = any free one
    secret: bytes
    trust_remote_code: bool = False


class Meeting(Struct, frozen=True):
    """Where the ranks of a replica meet: two ports of one host, and 32 random bytes that say who belongs here."""

    host: str
    store_port: int
    link_port: int
    token: bytes


class ReplicaStarted(Struct, frozen=True, kw_only=True):
    """What a replica knows about itself once it is ready."""

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
    notes: list[str]  # sentences worth showing once: which kernels, what was chosen and why
