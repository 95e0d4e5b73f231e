"""Flags that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

Host = Annotated[str | None, typer.Option("--host", help="Interface of the HTTP and gRPC API. [default: 127.0.0.1]")]
Port = Annotated[int | None, typer.Option("--port", help="HTTP port. [default: 8000]")]
GrpcPort = Annotated[int | None, typer.Option("--grpc-port", help="gRPC port. [default: 8001]")]
Routers = Annotated[
    int | None, typer.Option("--routers", help="Router processes that share --port and --grpc-port. [default: 1]")
]
MigrationLimit = Annotated[
    int | None, typer.Option("--migration-limit", help="Times a stream may move when its replica is lost. [default: 3]")
]
Disaggregation = Annotated[
    str | None,
    typer.Option("--disaggregation", help="Prompts to prefill replicas: auto (where it pays), always or off."),
]
Rebalancing = Annotated[
    str | None, typer.Option("--rebalancing", help="on or off: streams leave replicas that are short. [default: on]")
]
AdminPort = Annotated[int | None, typer.Option("--admin-port", help="Port of the admin API. [default: 8002]")]
Config = Annotated[Path | None, typer.Option("--config", "-f", help="A cluster spec in YAML.")]
Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Hub id, folder, .gguf file, or the embedded 'smollm2' (the default)."),
]
ServedName = Annotated[str | None, typer.Option("--served-model-name", help="What requests call the model.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Of the Hub repository.")]
Replicas = Annotated[int | None, typer.Option("--replicas", help="Copies of the model. [default: 1]")]
Prefill = Annotated[int | None, typer.Option("--prefill", help="Replicas that only compute prompts; with --decode.")]
Decode = Annotated[int | None, typer.Option("--decode", help="Replicas that answer; with --prefill.")]
PrefillTp = Annotated[int | None, typer.Option("--prefill-tp", help="--tp of the prefill pool.")]
PrefillPp = Annotated[int | None, typer.Option("--prefill-pp", help="--pp of the prefill pool.")]
DecodeTp = Annotated[int | None, typer.Option("--decode-tp", help="--tp of the decode pool.")]
DecodePp = Annotated[int | None, typer.Option("--decode-pp", help="--pp of the decode pool.")]
Tp = Annotated[int | None, typer.Option("--tp", help="Ranks that share each layer. [default: 1]")]
Pp = Annotated[int | None, typer.Option("--pp", help="Pipeline stages. [default: 1]")]
Ep = Annotated[
    bool | None, typer.Option("--ep", help="Whole experts per tensor-parallel rank, not parts.", is_flag=True)
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
LoadFormat = Annotated[str | None, typer.Option("--load-format", help="auto, safetensors, gguf or dummy.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Prompt + output tokens of a request.")]
KvMemory = Annotated[str | None, typer.Option("--kv-cache-memory", help="KV cache per rank, such as 2GiB.")]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="Tokens per KV-cache block. [default: 16]")]
MaxSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Requests that run at a time.")]
MaxBatched = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="Tokens of one step.")]
CpuThreads = Annotated[int | None, typer.Option("--cpu-threads", help="Threads of one rank.")]
CpuShare = Annotated[float | None, typer.Option("--cpu-share", help="Ray CPUs that a rank on a CPU reserves.")]
AsyncScheduling = Annotated[
    str | None, typer.Option("--async-scheduling", help="auto, on or off: plan a step while the last one runs.")
]
CudaGraphs = Annotated[str | None, typer.Option("--cuda-graphs", help="full or off: replay whole steps on GPUs.")]
Deterministic = Annotated[
    bool | None, typer.Option("--deterministic", help="Bits that never depend on the batch; slower.", is_flag=True)
]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Folder for profiles, which `headrace profile` asks for.")
]
TrustCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", is_flag=True)
]
RayAddress = Annotated[str | None, typer.Option("--ray-address", help="Join this Ray (host:port, or auto).")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="The cluster's name in Ray. [default: headrace]")]
ControlHost = Annotated[str | None, typer.Option("--control-host", help="Interface for routers of the controller.")]
ControlPort = Annotated[int | None, typer.Option("--control-port", help="Its port. [default: any]")]
SecretFile = Annotated[Path | None, typer.Option("--secret-file", help="Holds the cluster's secret.")]
ApiKeysFile = Annotated[Path | None, typer.Option("--api-keys-file", help="One API key a line, or name:key.")]
NoAuth = Annotated[
    bool | None, typer.Option("--allow-no-auth", help="Listen beyond this machine without keys.", is_flag=True)
]
Replica = Annotated[str, typer.Argument(metavar="REPLICA", help="As `status` names it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the document for programs.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="HEADRACE_API_KEY", help="Key of the API, if it needs one.")
]


def client_setting(name: str, given: Any, default: Any) -> Any:
    """Where a client command connects: flag > environment > default. Raises SpecError."""
    from headrace_cluster.errors import SpecError
    from headrace_cluster.settings import from_environment

    if given is not None:
        return given
    import os

    value = from_environment(os.environ).get(name)
    if value is None:
        return default
    try:
        return type(default)(value)
    except ValueError:
        raise SpecError(f"HEADRACE_{name.upper()} must be a number, not '{value}'") from None
