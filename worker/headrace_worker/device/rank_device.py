"""The one interface through which the engine uses a device: its memory, its order of work, its errors.

`CpuDevice` and `CudaDevice` implement it; a test that needs no GPU implements it by recording what is called.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Mark(Protocol):
    """A point in a stream: the end of everything that was launched there before."""

    def synchronize(self) -> None:
        """Waits on the host until it is reached."""
        ...

    def query(self) -> bool:
        """Whether it is reached."""
        ...


class Download(Protocol):
    """An asynchronous copy of tensors to the host. It begins at once and waits for nothing that is launched later."""

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in their order."""
        ...


class GraphRecorder(Protocol):
    """Makes a step replayable. What steps read and write is allocated; then each one is warmed up and recorded."""

    def allocate(self, make: Callable[[], T]) -> T:
        """Returns what `make` allocates. Raises what it raises."""
        ...

    def warm_up(self, step: Callable[[], object]) -> None:
        """Run the step normally, collectives between ranks included."""
        ...

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Returns what runs the step again on the same inputs, and where its outputs are until any recording runs.

        Computes nothing. Raises when it cannot be recorded.
        """
        ...

    def seconds(self, replay: Callable[[], None]) -> float:
        """Seconds of a replay on the device: the largest of all ranks that record together."""
        ...


class RankDevice(Protocol):
    """The device of one rank. It is chosen once, with its index, before anything is built on it."""

    torch_device: torch.device  # device of tensors; with an index, unless it is the CPU
    asynchronous: bool  # launches return before the work is done
    uses_nccl: bool  # ranks exchange its tensors over NCCL, not over gloo or shared memory

    def use(self) -> None:
        """Makes it this thread's current device. A thread starts with the first visible GPU, and kernels and streams
        use the current device by default: every thread that computes must call this first.
        """
        ...

    def watch_faults(self, on_fault: Callable[[str], None]) -> Callable[[], None]:
        """Calls `on_fault` once, on another thread, with a sentence, if the device is found to be defective.

        Returns what ends the watch.
        """
        ...

    def free_memory(self) -> int:
        """Bytes that this process may still allocate, container limits respected."""
        ...

    def total_memory(self) -> int:
        """Bytes of the device, used or not; on a CPU as `free_memory`."""
        ...

    def reset_peak(self) -> None:
        """`peak_bytes` counts from now on."""
        ...

    def peak_bytes(self) -> int:
        """Bytes that this process had reserved at most, besides what it had allocated at the last `reset_peak`."""
        ...

    def release_cached(self) -> None:
        """Memory that is reserved and not in use becomes free."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an allocation failed: the device still works."""
        ...

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An unfilled tensor in host memory, for copies that do not wait."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, without waiting. On the CPU it is the same tensor."""
        ...

    def upload_into(self, target: Tensor, tensor: Tensor) -> None:
        """Copies a host tensor into one on the device, without waiting."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Begins to copy tensors to the host."""
        ...

    def mark(self) -> Mark:
        """The end of what this thread's current stream has."""
        ...

    def synchronize(self) -> None:
        """Waits on the host for this thread's current stream."""
        ...

    def recorder(self) -> GraphRecorder | None:
        """The recorder of steps; None where a step is launched by running it."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Whether nothing can be computed here any more, in this process: after an error that a step raised."""
        ...
