"""Faults of a GPU that the NVIDIA driver reports: its Xid events.

A kernel that uses broken memory raises an error in this process, which ends its device anyway. The driver also reports
faults that no call of this process returns, such as those of another process on the same GPU, or of an idle GPU.
"""

import threading
from collections.abc import Callable
from typing import Any

import structlog

WAIT_MS = 1000  # length of one wait, after which the watch may end
RETRY_SECONDS = 5.0  # after an error of the driver's interface that is none of the GPU

FATAL_XIDS = {
    48: "an uncorrectable memory error",
    62: "its microcontroller has halted",
    64: "broken memory that could not be replaced",
    79: "it is no longer on the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    140: "an unrecovered memory error",
}
"""After which nothing that the GPU computes can be relied on, by NVIDIA's Xid catalog for A100 and later.

Not in it: errors of programs (13, 31, 43, 45, 109), reports of repairs (63, 92, 160), contained memory errors (94),
which end the process that they affect, and those of links between GPUs, which NCCL raises or waits for.
"""

log = structlog.get_logger(__name__)


class GpuFaultWatch:
    """Calls `on_fault` with a sentence, on a thread of its own, at the first fatal event of one GPU."""

    def __init__(self, name: str, uuid: str, on_fault: Callable[[str], None]) -> None:
        """name: of the GPU in the sentence. uuid: as the driver names it, `GPU-...`."""
        self._name = name
        self._uuid = uuid
        self._on_fault = on_fault
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-gpu-faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch, within a second; does not wait for that."""
        self._ended.set()

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError:
            log.warning("faults of the GPU are not watched: install nvidia-ml-py", device=self._name)
            return
        try:
            pynvml.nvmlInit()
            try:
                self._watch(pynvml)
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.warning("faults of the GPU are not watched: the driver refuses", device=self._name, error=str(error))

    def _watch(self, nvml: Any) -> None:
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(
                nvml.nvmlDeviceGetHandleByUUID(self._uuid), nvml.nvmlEventTypeXidCriticalError, events
            )
            while not self._ended.is_set():
                try:
                    event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
                except nvml.NVMLError_Timeout:
                    continue
                except nvml.NVMLError_GpuIsLost:
                    self._report(FATAL_XIDS[79])
                    return
                except nvml.NVMLError as error:
                    log.warning("an event of the GPU could not be read", device=self._name, error=str(error))
                    self._ended.wait(RETRY_SECONDS)
                    continue
                if self._handle(int(event.eventData)):
                    return
        finally:
            nvml.nvmlEventSetFree(events)

    def _handle(self, xid: int) -> bool:
        fault = FATAL_XIDS.get(xid)
        if fault is None:
            log.warning("the driver reports an event of the GPU", device=self._name, xid=xid)
            return False
        self._report(f"Xid {xid}, {fault}")
        return True

    def _report(self, fault: str) -> None:
        self._on_fault(f"{self._name} is defective: the driver reports {fault}")
