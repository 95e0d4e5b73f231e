"""Checks whether models can be built as configured, without weights and before any rank is started.

python -m headrace_worker.model.preflight < CONFIGS     CONFIGS: a msgpack list of ReplicaConfig, with device cpu or
                                                        cuda; writes a msgpack `footprint.PreflightResult`.
"""

import os
import sys

import msgspec
import torch

from headrace_proto.errors import HeadraceError
from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.kv.sizing import request_limit
from headrace_worker.core.layout import CacheLayout
from headrace_worker.device.choice import choose_dtype
from headrace_worker.model.build import build_meta, check_rope, output_rows, read_config
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.facts import read_facts
from headrace_worker.model.footprint import Footprint, PreflightResult
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.isolated_rank import IsolatedRank
from headrace_worker.model.load import open_weights
from headrace_worker.model.sharding.shard import shard
from headrace_worker.model.source import resolve
from headrace_worker.model.weights import Weights, match

META = torch.device("meta")


def build_without_weights(config: ReplicaConfig) -> Footprint:
    """Raises the HeadraceError that the ranks would raise once they build their part of the model."""
    source = resolve(config.source, config.load_format, config.revision)
    dtype = choose_dtype(config.dtype, config.device, config.deterministic)
    gguf = GgufFile(source.path) if source.is_gguf else None
    model_config = read_config(source, gguf, config.trust_remote_code)
    check_rope(model_config, config.max_model_len)
    layouts: list[CacheLayout] = []
    weight_bytes = rows = 0
    # Uneven shards differ between the first and the last rank of a stage; stages differ at their ends.
    for stage, place in {(0, 0), (config.pp - 1, config.tp - 1)}:
        parallel = ParallelContext(IsolatedRank(place, config.tp), stage, config.pp, config.ep)
        model = build_meta(model_config, dtype, config.trust_remote_code)
        rows = output_rows(model)
        layouts.append(cache_layout(model.config, config.block_size, dtype.itemsize, parallel))
        sharding = shard(model, parallel, META)
        weights = open_weights(source, model, sharding, gguf)
        read, _ = match(model, weights, sharding)
        local = model.state_dict()
        packed = config.device == "cpu" and dtype is torch.float32
        sizes = (
            round(local[name].nbytes * (_packed_share(config, weights, local[name], stored) if packed else 1.0))
            for name, stored in read.items()
        )
        weight_bytes = max(weight_bytes, sum(sizes))
    facts = read_facts(source, model.config, gguf, rows, config.trust_remote_code)
    request_limit(config.max_model_len, facts.max_positions)
    return Footprint(max(layouts, key=lambda layout: layout.block_bytes), weight_bytes, facts.max_positions)


def _packed_share(config: ReplicaConfig, weights: Weights, tensor: torch.Tensor, stored: str) -> float:
    rounded = config.cpu_arithmetic == "bf16" and tensor.dim() == 2
    return min(weights.packed_share(stored), 0.5 if rounded else 1.0)


def main() -> int:
    # Output of libraries and of a model's own code must not mix with the answer.
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    footprints: list[Footprint] = []
    error = ""
    for config in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[ReplicaConfig]):
        try:
            footprints.append(build_without_weights(config))
        except HeadraceError as failure:
            error = str(failure)
            break
    with os.fdopen(out, "wb") as file:
        file.write(msgspec.msgpack.encode(PreflightResult(footprints, error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
