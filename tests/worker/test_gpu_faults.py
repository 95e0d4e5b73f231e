"""What the driver reports of a GPU, through a fake NVML."""

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from headrace_worker.device import gpu_faults
from headrace_worker.device.gpu_faults import GpuFaultWatch

Event = int | Exception
"""An Xid, or an error of NVML."""


def faults(monkeypatch: pytest.MonkeyPatch, *events: Event) -> list[str]:
    """What a watch reports of these events, until it ends or all are read."""
    reported: list[str] = []
    left, done = list(events), threading.Event()

    def wait(*_: object) -> Any:
        if not left:
            done.set()
            raise pynvml.NVMLError_Timeout(pynvml.NVML_ERROR_TIMEOUT)
        event = left.pop(0)
        if isinstance(event, Exception):
            raise event
        return SimpleNamespace(eventData=event)

    for name in ("Init", "Shutdown", "EventSetCreate", "EventSetFree", "DeviceRegisterEvents", "DeviceGetHandleByUUID"):
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda *_: None)
    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", wait)
    monkeypatch.setattr(gpu_faults, "RETRY_SECONDS", 0.01)
    watch = GpuFaultWatch("cuda:0", "GPU-1234", reported.append)
    while watch._thread.is_alive() and not done.wait(0.01):
        pass
    watch.stop()
    watch._thread.join(5)
    return reported


def test_a_fatal_event_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults(monkeypatch, 63, 31, 79, 48)
    assert found == ["cuda:0 is defective: the driver reports Xid 79, it is no longer on the bus"]


def test_a_lost_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults(monkeypatch, pynvml.NVMLError_GpuIsLost(pynvml.NVML_ERROR_GPU_IS_LOST), 48)
    assert found == ["cuda:0 is defective: the driver reports it is no longer on the bus"]


def test_errors_of_programs_repairs_and_of_the_interface_are_not_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = pynvml.NVMLError_Unknown(pynvml.NVML_ERROR_UNKNOWN)
    assert faults(monkeypatch, 13, 31, 43, unknown, 45, 63, 92, 94, 109) == []
    assert len(faults(monkeypatch, unknown, 48)) == 1
