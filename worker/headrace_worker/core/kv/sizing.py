"""Memory of the KV cache, and the maximum length of a request. The free memory is passed in."""

from dataclasses import dataclass, replace

from headrace_base.errors import MemoryTooSmallError, ModelUnsupportedError, counted, size_text
from headrace_worker.core.kv.states import SLOTS_PER_ROW
from headrace_worker.core.layout import CacheLayout

DEFAULT_MAX_NUM_SEQS = 256
_CPU_SHARE = 0.3  # share of the free memory: other replicas' weights, the object store and the page cache need the rest
_HEADROOM_BYTES, _HEADROOM_SHARE = 512 << 20, 0.02
_FEWEST_SNAPSHOTS, _MOST_SNAPSHOTS = 4, 16  # per row: fewer lose hits, more add hardly any
HEADROOM_REASON = "for fragmentation and what is not measured"


@dataclass(frozen=True, slots=True)
class KvSize:
    """Blocks of the pool, the null block included, and a sentence that explains how they were chosen."""

    num_blocks: int
    num_bytes: int  # recurrent states included
    note: str
    max_num_seqs: int  # that have memory for their recurrent states
    state_slots: int = 1  # slot 0 included; 1 on a rank without recurrent layers until all ranks agree
    warnings: tuple[str, ...] = ()

    def reduced(self, num_blocks: int, max_num_seqs: int, state_slots: int, layout: CacheLayout) -> "KvSize":
        """At most these numbers, because another rank has memory for no more."""
        size = replace(
            self,
            num_blocks=min(num_blocks, self.num_blocks),
            max_num_seqs=min(max_num_seqs, self.max_num_seqs),
            state_slots=state_slots,
        )
        if size == self:
            return self
        cache, states = size.num_blocks * layout.block_bytes, size.state_slots * layout.state_bytes
        beside = f" and {size.state_slots} recurrent states" if state_slots > 1 else ""
        note = (
            f"KV cache: {size_text(cache)} for {_tokens(size.num_blocks, layout):,} tokens{beside}, as much as fits on "
            "the rank with the least memory."
        )
        return replace(size, num_bytes=cache + states, note=note)


def size_kv(
    layout: CacheLayout,
    *,
    device_type: str,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory: int | None = None,
    state_snapshots: int | None = None,
    reserved: int = 0,
    headroom: int = 0,
    free: int,
) -> KvSize:
    """Choose the number of KV blocks from the memory, `free` bytes, that is free once the weights are loaded.

    Without `kv_cache_memory` (bytes) the cache gets what is free less `reserved` and `headroom` bytes on a GPU, and a
    share of what is free less `reserved` on a CPU; at most what `max_num_seqs` requests of `max_model_len` tokens can
    fill. `kv_cache_memory` may use the headroom too. Half of it is for recurrent states at most, of which each request
    needs two; the others are `state_snapshots` of the prefix cache. Raises MemoryTooSmallError when one request of
    `max_model_len` does not fit.
    """
    available = max(0, free - reserved)
    per_request = len(layout.groups) * -(-max_model_len // layout.block_size)
    one, all_blocks = (per_request + 1) * layout.block_bytes, (per_request * max_num_seqs + 1) * layout.block_bytes
    smallest = one + (1 + SLOTS_PER_ROW) * layout.state_bytes
    snapshots = max_num_seqs * _MOST_SNAPSHOTS if state_snapshots is None else state_snapshots
    most = all_blocks + (1 + SLOTS_PER_ROW * max_num_seqs + snapshots) * layout.state_bytes
    if kv_cache_memory is not None:
        if kv_cache_memory > available:
            raise MemoryTooSmallError(
                f"--kv-cache-memory is {size_text(kv_cache_memory)}, but {size_text(available)} are free: "
                "give a smaller --kv-cache-memory."
            )
        budget, reason = kv_cache_memory, "from --kv-cache-memory"
    else:
        if device_type == "cuda":
            budget = max(0, available - headroom)
            reason = f"of {size_text(available)} that are free, less {size_text(headroom)} {HEADROOM_REASON}"
        else:
            budget = int(available * _CPU_SHARE)
            reason = f"{_CPU_SHARE:.0%} of the {size_text(available)} that are free"
        if most < budget:
            budget, reason = most, f"enough for {counted(max_num_seqs, 'request')} of {max_model_len} tokens"
    if budget < smallest:
        # Half of the cache is for recurrent states at most, of which there must be three.
        states = (1 + SLOTS_PER_ROW) * layout.state_bytes
        blocks = (budget - states) // layout.block_bytes if layout.block_bytes and states <= budget // 2 else 0
        tokens = max(0, _tokens(blocks, layout))
        advice = f"--max-model-len {tokens}" if tokens else "a machine with more memory"
        raise MemoryTooSmallError(
            f"One request of {max_model_len} tokens needs a KV cache of {size_text(smallest)}, but it gets "
            f"{size_text(budget)} ({reason}): use {advice}, or a larger --kv-cache-memory."
        )
    rows, slots = max_num_seqs, 1
    if layout.states:
        fitting = min(budget // 2, budget - one) // layout.state_bytes
        if state_snapshots and fitting < 1 + SLOTS_PER_ROW + state_snapshots:
            raise MemoryTooSmallError(
                f"--state-snapshots {state_snapshots} and the two states of a request need "
                f"{size_text((1 + SLOTS_PER_ROW + state_snapshots) * layout.state_bytes)}, but states get half of the "
                f"cache, {size_text(fitting * layout.state_bytes)}: give {max(0, fitting // 2)} or fewer, or a larger "
                "--kv-cache-memory."
            )
        rows, slots = _divide(fitting, max_num_seqs, state_snapshots)
        budget = min(budget - slots * layout.state_bytes, all_blocks)
        count = counted(slots - 1 - SLOTS_PER_ROW * rows, "snapshot")
        reason += (
            f"; beside it {slots:,} recurrent states of {size_text(layout.state_bytes)}, {SLOTS_PER_ROW} for each of "
            f"{counted(rows, 'running request')} and {count} for the prefix cache"
        )
    warnings: tuple[str, ...] = ()
    if rows < max_num_seqs:
        warnings = (
            f"{counted(rows, 'request')} at a time instead of {max_num_seqs}, since each needs two recurrent states of "
            f"{size_text(layout.state_bytes)} and some snapshots: a larger --kv-cache-memory or fewer "
            "--state-snapshots leave more.",
        )
    latents = " of latents" if any(group.value_dim == 0 for group in layout.groups) else ""
    # A pipeline stage without attention holds any number: as many as all requests can fill.
    blocks = budget // layout.block_bytes if layout.block_bytes else per_request * rows + 1
    return KvSize(
        num_blocks=blocks,
        num_bytes=blocks * layout.block_bytes + slots * layout.state_bytes,
        note=f"KV cache: {size_text(blocks * layout.block_bytes)}{latents} for {_tokens(blocks, layout):,} tokens, "
        f"{reason}.{_unused(layout)}",
        max_num_seqs=rows,
        state_slots=slots,
        warnings=warnings,
    )


def _divide(fitting: int, max_num_seqs: int, snapshots: int | None) -> tuple[int, int]:
    """Rows, and slots of recurrent state for them and for snapshots, slot 0 included; `fitting` have memory."""
    if snapshots is None:
        rows, most = (fitting - 1) // (SLOTS_PER_ROW + _FEWEST_SNAPSHOTS), _MOST_SNAPSHOTS * max_num_seqs
    else:
        rows, most = (fitting - 1 - snapshots) // SLOTS_PER_ROW, snapshots
    rows = max(1, min(rows, max_num_seqs))
    return rows, 1 + SLOTS_PER_ROW * rows + max(0, min(most, fitting - 1 - SLOTS_PER_ROW * rows))


def _unused(layout: CacheLayout) -> str:
    """A sentence about memory that no layer uses: their sizes or numbers do not divide each other."""
    used = sum(len(group.layers) * sum(group.entries) for group in layout.groups)
    share = 1 - used / (len(layout.groups) * layout.slots * sum(layout.slot_entries)) if used else 0.0
    return f" {share:.0%} of it is unused: its layers do not fill all slots." if share > 0.05 else ""


def _tokens(blocks: int, layout: CacheLayout) -> int:
    """That so many blocks hold, the null block included."""
    return (blocks - 1) // len(layout.groups) * layout.block_size


def gpu_headroom(total: int) -> int:
    """Bytes of a GPU's `total` that a cache of no given size leaves: the allocator's fragments, other streams' memory,
    and buffers that libraries allocate once more requests run than were measured.
    """
    return max(_HEADROOM_BYTES, int(total * _HEADROOM_SHARE))


def request_limit(wanted: int | None, positions: int) -> int:
    """Tokens of the longest request. Raises ModelUnsupportedError when `wanted` exceeds the model's positions."""
    if wanted is not None and wanted > positions:
        raise ModelUnsupportedError(
            f"--max-model-len {wanted} is beyond the {positions} positions of the model: give at most that"
        )
    return wanted or positions
