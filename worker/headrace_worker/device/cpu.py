"""The CPU as the device of a rank: everything is done when a call returns."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace_worker.device.memory import available_memory
from headrace_worker.device.rank_device import Download, GraphRecorder, Mark


class Reached:
    """A mark that is reached."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        return True


class Copied:
    """Tensors that are on the host anyway."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[Tensor]:
        return self._tensors


_REACHED = Reached()


class CpuDevice:
    """Implements `RankDevice`."""

    asynchronous = False
    uses_nccl = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def use(self) -> None:
        """There is one."""

    def watch_faults(self, on_fault: Callable[[str], None]) -> Callable[[], None]:
        """Defects of a CPU are not reported."""
        return lambda: None

    def free_memory(self) -> int:
        return available_memory()

    def total_memory(self) -> int:
        return available_memory()

    def reset_peak(self) -> None:
        """Nothing is measured."""

    def peak_bytes(self) -> int:
        return 0

    def release_cached(self) -> None:
        """Nothing is kept."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def upload_into(self, target: Tensor, tensor: Tensor) -> None:
        target.copy_(tensor)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return Copied(tensors)

    def mark(self) -> Mark:
        return _REACHED

    def synchronize(self) -> None:
        """Nothing runs."""

    def recorder(self) -> GraphRecorder | None:
        return None

    def is_lost(self, error: BaseException) -> bool:
        return False
