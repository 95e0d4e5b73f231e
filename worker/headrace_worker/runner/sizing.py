"""How much memory the KV cache gets."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace_proto.errors import MemoryTooSmallError
from headrace_worker.layout import CacheLayout

_CPU_SHARE = 0.3  # of what is free: weights of other replicas, the object store and page cache live beside us
_CUDA_SHARE = 0.9
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class KvSize:
    """Blocks of the pool, the null block included, and a sentence that says how they were chosen."""

    num_blocks: int
    num_bytes: int
    note: str

    def reduced(self, num_blocks: int, layout: CacheLayout) -> "KvSize":
        """No more than `num_blocks`, because another rank has room for no more."""
        if num_blocks >= self.num_blocks:
            return self
        tokens = (num_blocks - 1) // len(layout.groups) * layout.block_size
        size = num_blocks * layout.block_bytes
        note = f"KV cache: {_size(size)} for {tokens:,} tokens, as much as the rank with least room can hold."
        return KvSize(num_blocks, size, note)


def size_kv(
    layout: CacheLayout,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory: int | None = None,
    activation_bytes: int = 0,
    free: int | None = None,
) -> KvSize:
    """Choose the number of KV blocks from the memory that is free once the weights are loaded.

    Without `kv_cache_memory` (bytes) the cache gets a share of what is free less `activation_bytes`, and at most what
    `max_num_seqs` requests of `max_model_len` tokens can fill. `free` is measured when not given. Raises
    MemoryTooSmallError when one request of `max_model_len` does not fit.
    """
    available = max(0, (free_memory(device) if free is None else free) - activation_bytes)
    per_request = len(layout.groups) * -(-max_model_len // layout.block_size)
    smallest = (per_request + 1) * layout.block_bytes
    most = (per_request * max_num_seqs + 1) * layout.block_bytes
    if kv_cache_memory is not None:
        if kv_cache_memory > available:
            raise MemoryTooSmallError(
                f"The KV cache is to take {_size(kv_cache_memory)}, but {_size(available)} are free: "
                "give a smaller --kv-cache-memory."
            )
        budget, reason = kv_cache_memory, "as --kv-cache-memory says"
    else:
        share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
        budget, reason = int(available * share), f"{share:.0%} of the {_size(available)} that are free"
        if most < budget:
            budget, reason = most, f"enough for {max_num_seqs} requests of {max_model_len} tokens"
    if budget < smallest:
        tokens = max(0, budget // layout.block_bytes - 1) // len(layout.groups) * layout.block_size
        advice = f"--max-model-len {tokens}" if tokens else "a machine with more memory"
        raise MemoryTooSmallError(
            f"One request of {max_model_len} tokens needs a KV cache of {_size(smallest)}, but it gets {_size(budget)} "
            f"({reason}): use {advice}, or a larger --kv-cache-memory."
        )
    blocks = budget // layout.block_bytes
    tokens = (blocks - 1) // len(layout.groups) * layout.block_size
    return KvSize(
        num_blocks=blocks,
        num_bytes=blocks * layout.block_bytes,
        note=f"KV cache: {_size(blocks * layout.block_bytes)} for {tokens:,} tokens, {reason}.",
    )


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on `device`, container limits respected."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_meminfo_available()]
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            limits.append(max(0, limit - usage))
    return min(limits)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
