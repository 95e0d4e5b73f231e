"""What the driver reports of a GPU, through a fake NVML library."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Each wait returns the next of the Xids in the environment, a negative one as an error of NVML; then it times out (10).
_NVML = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { void *device; unsigned long long type, data; unsigned gpu, compute; } Event;
static int gpu, set;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlEventSetCreate(void **made) { *made = &set; return 0; }
int nvmlEventSetFree(void *events) { return events == &set ? 0 : 2; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &gpu;
    return strcmp(uuid, "GPU-1234") ? 6 : 0;
}
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *events) {
    return device == &gpu && types == 8 && events == &set ? 0 : 3;
}
int nvmlEventSetWait_v2(void *events, Event *event, unsigned milliseconds) {
    static char *next = 0;
    if (!next) next = getenv("XIDS");
    if (!*next) { usleep(1000); return 10; }
    event->device = &gpu; event->type = 8;
    long long xid = strtoll(next, &next, 10);
    event->data = xid;
    return xid < 0 ? -xid : 0;
}
"""
_WATCH = """
import sys, time
from headrace_worker.device import gpu_faults
from headrace_worker.device.gpu_faults import GpuFaultWatch
gpu_faults.RETRY_SECONDS = 0.01
watch = GpuFaultWatch("cuda:0", sys.argv[1], print)
time.sleep(0.5)
alive = watch._thread.is_alive()
watch.stop()
watch._thread.join(5)
print("alive" if alive else "ended", watch._thread.is_alive())
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(_NVML)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "nvml.c")], check=True)
    return folder


def _watch(nvml: Path, xids: str, uuid: str = "GPU-1234") -> tuple[list[str], str]:
    environment = {"LD_LIBRARY_PATH": str(nvml), "XIDS": xids}
    done = subprocess.run(
        [sys.executable, "-c", _WATCH, uuid], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    faults = [line for line in lines if "defective" in line]
    return [*faults, lines[-1]], done.stdout + done.stderr


def test_a_fatal_event_is_reported_once(nvml: Path) -> None:
    found, _ = _watch(nvml, "63 31 79 48")
    assert found == ["cuda:0 is defective: the driver reports Xid 79, it is no longer on the bus", "ended False"]


def test_a_lost_gpu_is_reported(nvml: Path) -> None:
    """NVML_ERROR_GPU_IS_LOST (15) may come instead of Xid 79."""
    found, _ = _watch(nvml, "63 -15 48")
    assert found == ["cuda:0 is defective: the driver reports it is no longer on the bus", "ended False"]


def test_an_error_of_the_interface_does_not_end_the_watch(nvml: Path) -> None:
    """NVML_ERROR_UNKNOWN (999)."""
    found, output = _watch(nvml, "-999 -999 48")
    assert found == ["cuda:0 is defective: the driver reports Xid 48, an uncorrectable memory error", "ended False"]
    assert output.count("could not be read") == 2


def test_errors_of_programs_and_repairs_are_not_defects(nvml: Path) -> None:
    found, output = _watch(nvml, "13 31 43 45 63 92 94 109")
    assert found == ["alive False"]
    assert output.count("the driver reports an event of the GPU") == 8


def test_a_gpu_that_cannot_be_watched_is_logged(nvml: Path, tmp_path: Path) -> None:
    for found, output in (_watch(nvml, "79", "GPU-5678"), _watch(tmp_path, "79")):
        assert found == ["ended False"] and "not watched" in output
