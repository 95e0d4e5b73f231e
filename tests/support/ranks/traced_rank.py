"""Lets a rank process trace what it launches and sends besides the calls of its device: kernels that use KV blocks,
NCCL over gloo, the connections of transfers. It is for a process of its own: nothing is restored.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

import headrace_kernels.ops as ops
from headrace_worker.comm import group as groups
from headrace_worker.core.transfer import fetching
from headrace_worker.core.transfer.fetch import FetchLimits
from headrace_worker.core.transfer.orders import Receive
from headrace_worker.kv_transfer import peer_connection
from headrace_worker.kv_transfer.pair_group import PairGroup
from headrace_worker.ranks import join
from support.worker.traced_device import TracedDevice

ABORT_SECONDS = 0.0
_UNUSED = 99  # tag


def trace_rank(device: TracedDevice) -> None:
    """Before anything of the rank is built."""
    _trace_kernels(device)
    _trace_nccl(device)
    _trace_transfers(device)
    # Eight ranks on two cores are slow: what is tested is the order of calls, not how long they take.
    patched: Any = fetching
    patched.FetchLimits = partial(FetchLimits, silence=60.0, min_seconds=60.0)


def _trace_kernels(device: TracedDevice) -> None:
    write_kv, rope_write_kv, attention = ops.write_kv, ops.rope_write_kv, ops.paged_attention

    def stored(pool: Tensor, slots: Tensor) -> None:
        found = {slot // pool.shape[3] for slot in slots.tolist() if slot >= 0}
        device.trace("kernel.write", memory=device.add_pool(pool), blocks=tuple(sorted(found)))

    def traced_write(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, *rest: Any) -> None:
        stored(pool, slots)
        write_kv(key, value, pool, slots, *rest)

    def traced_rope(
        query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor, *rest: Any
    ) -> Tensor:
        stored(pool, slots)
        return rope_write_kv(query, key, value, cos, sin, pool, slots, *rest)

    def traced_attention(query: Tensor, pool: Tensor, meta: Any, **options: Any) -> Tensor:
        size = pool.shape[3]
        rows = zip(meta.block_tables.tolist(), meta.seq_lens.tolist(), strict=False)
        found = {block for table, length in rows for block in table[: -(-length // size)]}
        device.trace("kernel.read", memory=device.add_pool(pool), blocks=tuple(sorted(found)))
        return attention(query, pool, meta, **options)

    patched: Any = ops
    patched.write_kv, patched.rope_write_kv, patched.paged_attention = traced_write, traced_rope, traced_attention


def _trace_nccl(device: TracedDevice) -> None:
    class TracedNccl:
        """The part of `ProcessGroupNCCL` that groups use, over gloo."""

        Options = SimpleNamespace
        name = ""  # of the next group

        def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
            self._name, self._rank, self._size = TracedNccl.name, rank, size
            gloo: Any = dist.ProcessGroupGloo
            made = gloo._Options()
            made._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
            made._timeout = options._timeout
            self._gloo = gloo(store, rank, size, made)

        def eager_connect_single_device(self, index: torch.device) -> None:
            device.trace_from_any_thread("nccl.connect", group=self._name)

        def abort(self) -> None:
            device.trace_from_any_thread("nccl.abort", group=self._name)
            groups.Group(self._gloo, self._rank, self._size, None).interrupt((self._rank + 1) % self._size, _UNUSED)  # type: ignore[arg-type]

        def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
            device.trace("nccl.send", group=self._name)
            return self._gloo.send(tensors, to, tag)

        def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
            device.trace("nccl.recv", group=self._name)
            return self._gloo.recv(tensors, source, tag)

        def allgather(self, out: list[list[Tensor]], tensors: list[Tensor]) -> Any:
            device.trace("nccl.allgather", group=self._name)
            return self._gloo.allgather(out, tensors)

        def allreduce(self, tensors: list[Tensor]) -> Any:
            device.trace("nccl.allreduce", group=self._name)
            return self._gloo.allreduce(tensors)

    def named(store: Store, name: str, *rest: Any) -> groups.Group:
        TracedNccl.name = name
        return groups.device_group(store, name, *rest)

    libraries: Any = dist
    libraries.is_nccl_available, libraries.ProcessGroupNCCL = lambda: True, TracedNccl
    groups.ABORT_SECONDS = ABORT_SECONDS
    joining: Any = join
    joining.device_group = named


def _trace_transfers(device: TracedDevice) -> None:
    class TracedPairGroup(PairGroup):
        def send(self, piece: Tensor, to: int) -> Any:
            device.trace("pair.send")
            return super().send(piece, to)

        def expect(self, piece: Tensor, source: int) -> Any:
            device.trace("pair.expect")
            return super().expect(piece, source)

    report = peer_connection.PeerConnection._report_received

    def traced_report(self: peer_connection.PeerConnection, order: Receive, num_bytes: int, *, good: bool) -> None:
        device.trace("pair.report")
        report(self, order, num_bytes, good=good)

    patched: Any = peer_connection
    patched.PairGroup, patched.PeerConnection._report_received = TracedPairGroup, traced_report
