"""The devices of ranks: which one, with its index, and which errors end it; on a fake CUDA that needs an index."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace_base.errors import DeviceError
from headrace_worker.device import choice, cuda
from headrace_worker.device.choice import open_device
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.device.cuda import CudaDevice
from support.child_environment import child_environment


class FakeCuda:
    """Records the calls of torch.cuda. It raises for a device without an index, as torch does where it needs one."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.calls: list[tuple[str, torch.device]] = []
        self.error: Exception | None = None
        self.events: list[bool] = []  # whether a wait for each one yields the core

    def Event(self, *, blocking: bool = False) -> Any:
        self.events.append(blocking)
        return SimpleNamespace(record=lambda stream=None: None)

    def current_stream(self, device: torch.device) -> None:
        self._note("current_stream", device)

    def is_available(self) -> bool:
        return self.gpus > 0

    def set_device(self, device: torch.device) -> None:
        self._note("set_device", device)

    def synchronize(self, device: torch.device) -> None:
        self._note("synchronize", device)
        if self.error is not None:
            raise self.error

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self._note("mem_get_info", device)
        return 1 << 30, 2 << 30

    def zeros(self, size: int, device: torch.device) -> None:
        self._note("zeros", device)

    def _note(self, name: str, device: torch.device) -> None:
        if device.index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
        if device.index >= self.gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.calls.append((name, device))


class FakeAcceleratorError(RuntimeError):
    def __init__(self, code: int) -> None:
        super().__init__("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported …")
        self.error_code = code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Two GPUs."""
    made = FakeCuda(2)
    torch_module: Any = SimpleNamespace(
        cuda=made,
        device=torch.device,
        zeros=made.zeros,
        version=SimpleNamespace(cuda="13.0"),
        OutOfMemoryError=torch.OutOfMemoryError,
        AcceleratorError=FakeAcceleratorError,
    )
    monkeypatch.setattr(choice, "torch", torch_module)
    monkeypatch.setattr(cuda, "torch", torch_module)
    return made


@pytest.mark.parametrize(("wanted", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_always_has_its_index(fake: FakeCuda, wanted: str, index: int) -> None:
    device = open_device(wanted)
    assert isinstance(device, CudaDevice) and device.torch_device == torch.device("cuda", index)
    assert fake.calls == [("set_device", device.torch_device), ("zeros", device.torch_device)]
    assert device.free_memory() == 1 << 30


def test_the_cpu(fake: FakeCuda) -> None:
    assert isinstance(open_device("cpu"), CpuDevice)
    fake.gpus = 0
    assert isinstance(open_device("auto"), CpuDevice)
    assert not fake.calls


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("cuda:2", "GPU 2 cannot be used .*nvidia-smi"),
        ("tpu", "'tpu' is unknown"),
        ("cuda:x", "'cuda:x' is unknown"),
        ("cuda:-1", "'cuda:-1' is unknown"),
    ],
)
def test_devices_that_do_not_exist(fake: FakeCuda, wanted: str, sentence: str) -> None:
    with pytest.raises(DeviceError, match=sentence):
        open_device(wanted)


def test_errors_that_end_the_device(fake: FakeCuda) -> None:
    device = open_device("cuda")
    assert device.is_lost(FakeAcceleratorError(700)), "an illegal memory access"
    assert not device.is_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert not device.is_lost(FakeAcceleratorError(2)), "a library's allocation"
    assert not device.is_lost(ValueError("one of ours")), "the device still answers"
    assert not device.is_lost(FakeAcceleratorError(900)), "an operation that cannot be recorded"
    fake.error = RuntimeError("CUDA error: unspecified launch failure")
    assert device.is_lost(ValueError("CUBLAS_STATUS_EXECUTION_FAILED")), "a library's, and the device does not answer"
    assert device.is_lost(FakeAcceleratorError(901)), "a recording that ended because of another error"


_TEAMS = """
import os, threading, torch
from headrace_worker.device.choice import use_threads

def compute():
    x = torch.randn(512, 3072)
    before = len(os.listdir("/proc/self/task"))
    x @ x.T, x + x
    print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())

def in_thread(run):
    thread = threading.Thread(target=run)
    thread.start(), thread.join()

def steps():
    assert use_threads(3) == 3
    for run in compute, compute, lambda: in_thread(compute):
        run()

in_thread(steps)
"""


def test_one_thread_of_a_rank_has_a_team() -> None:
    """Two teams on the same processors make every barrier of OpenMP sleep."""
    alone = child_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # as ranks are started
    done = subprocess.run([sys.executable, "-c", _TEAMS], env=alone, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["2 3", "0 3", "0 1"], "threads that a computation starts, and uses"
