"""The facts that a rank reports once it is ready."""

import gc
import os
from collections.abc import Sequence

import torch

from headrace_kernels import describe
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from headrace_worker.core.kv.sizing import KvSize
from headrace_worker.model.load import LoadedModel


def start_facts(
    config: ReplicaConfig,
    boot_id: bytes,
    model: LoadedModel,
    size: KvSize,
    *,
    address: str,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    team_notes: Sequence[str],
    notes: Sequence[str] = (),
) -> ReplicaStarted:
    """For the thread of the steps. `address` and `max_num_batched_tokens` are rank 0's: empty, 0 elsewhere."""
    return ReplicaStarted(
        model=config.model,
        address=address,
        boot_id=boot_id,
        pid=os.getpid(),
        device=str(model.device.torch_device),
        dtype=model.dtype_name,
        revision=model.source.revision,
        threads=torch.get_num_threads(),
        tp=config.tp,
        pp=config.pp,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_blocks=size.num_blocks - 1,
        kv_tokens=(size.num_blocks - 1) // len(model.layout.groups) * model.layout.block_size,
        kv_bytes=size.num_bytes,
        block_size=model.layout.block_size,
        weight_bytes=model.weight_bytes,
        defaults=model.facts.defaults,
        warnings=[*model.warnings, *size.warnings],
        notes=[*describe(), *model.notes, *team_notes, size.note, *notes],
    )


def freeze_loaded() -> None:
    """Loaded objects are never freed: a full collection would traverse all of them in the middle of a step."""
    gc.collect()
    gc.freeze()
