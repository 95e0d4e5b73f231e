"""Resource limits of this machine: GPUs, CPU shares, memory. No Ray, no model."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.core.placement import (
    PROCESS_BYTES,
    MemoryNeed,
    check_cpus,
    check_memory,
    gpus_per_rank,
    rank_gpus,
    threads_per_rank,
    waiting_sentence,
)
from headrace_cluster.errors import PlacementError
from headrace_cluster.launch import start_checks as machine
from headrace_cluster.launch.start_checks import this_machine
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_worker.device.memory import available_cores, available_memory

GIB = 1 << 30


def model(**fields: Any) -> ModelSpec:
    return ModelSpec.model_validate(fields)


def test_gpus_are_counted_over_all_models() -> None:
    small, large = model(name="small"), model(name="large", tp=2, replicas=2)
    assert gpus_per_rank([small, large], large, 5, "this machine") == 1
    with pytest.raises(PlacementError, match=r"5 GPUs are needed \(large: 2 replicas x 2 ranks\).*this machine has 4"):
        gpus_per_rank([small, large], large, 4, "this machine")
    assert gpus_per_rank([small], small, 0, "Ray") == 0, "auto is the CPU if there is no GPU"
    with pytest.raises(PlacementError, match=r"1 GPU is needed .*1 replica x 1 rank.* has none"):
        gpus_per_rank([small], model(device="cuda"), 0, "this machine")
    assert gpus_per_rank([small], model(device="cpu"), 0, "Ray") == 0


def test_each_replica_needs_its_own_gpus_only() -> None:
    """A lost node blocks no repair elsewhere: what the whole spec needs does not count."""
    large = model(name="large", tp=8, replicas=100)
    assert rank_gpus(large, 1) == 1
    assert rank_gpus(large, 0) == 0, "auto is the CPU if there is no GPU"
    assert rank_gpus(model(device="cuda"), 0) == 1, "it waits for a node with GPUs"
    assert rank_gpus(model(device="cpu"), 8) == 0


def test_a_replica_without_a_place_has_a_reason() -> None:
    needs = waiting_sentence(model(tp=2, pp=2, cpu_share=0.5), 1, {"CPU": 12.0, "GPU": 1.0, "memory": 5.0})
    assert "it needs 4 x 0.5 CPU, 1 GPU, each 2 on one node, and Ray has free: 12 CPU, 1 GPU" in needs
    assert "Ray has free: 0 CPU;" in waiting_sentence(model(cpu_share=0.5), 0, {})


def test_cpu_shares_may_fill_the_machine_and_no_more() -> None:
    check_cpus([model(replicas=40)], cores=2)
    check_cpus([model(replicas=20, cpu_share=0.1)], cores=2)
    with pytest.raises(PlacementError, match=r"41 ranks add up to 2\.05 CPUs, but this machine has 2"):
        check_cpus([model(replicas=41)], cores=2)


def test_forty_replicas_need_their_processes_and_weights() -> None:
    need = MemoryNeed(model(name="m", replicas=40), weights=GIB // 2)
    assert need.total == 40 * (PROCESS_BYTES + GIB // 2)
    check_memory([need], free=need.total)
    with pytest.raises(
        PlacementError, match=r"40 ranks x 0\.25 GiB .*40 replicas x 0\.50 GiB.*use --replicas 26 or less"
    ):
        check_memory([need], free=20 * GIB)


def test_the_advice_is_sufficient() -> None:
    for replicas in range(2, 60):
        need = MemoryNeed(model(name="m", replicas=replicas), weights=GIB // 3)
        try:
            check_memory([need], free=11 * GIB)
        except PlacementError as error:
            fewer = int(str(error).partition("--replicas ")[2].split()[0])
            assert fewer < replicas
            check_memory([MemoryNeed(model(name="m", replicas=fewer), weights=GIB // 3)], free=11 * GIB)
    with pytest.raises(PlacementError) as caught:
        check_memory([MemoryNeed(model(kv_cache_memory=64 * GIB, tp=2), weights=GIB)], free=20 * GIB)
    fits = int(str(caught.value).partition("--kv-cache-memory ")[2].split("MiB")[0])
    check_memory([MemoryNeed(model(kv_cache_memory=fits << 20, tp=2), weights=GIB)], free=20 * GIB)


def test_weights_that_never_fit_have_no_flag_as_advice() -> None:
    with pytest.raises(PlacementError, match="use a smaller model"):
        check_memory([MemoryNeed(model(), weights=30 * GIB)], free=20 * GIB)


def test_pools_are_added_up() -> None:
    pools = {"prefill": {"replicas": 1, "tp": 2}, "decode": {"replicas": 3}}
    need = MemoryNeed(model(name="m", **pools), weights=GIB)
    assert (need.ranks, need.replicas) == (5, 4)
    with pytest.raises(PlacementError, match="--prefill and --decode, together 2 or less"):
        check_memory([need], free=3 * GIB)


def test_this_machine_has_cores_and_memory() -> None:
    machine = this_machine()
    assert machine.cores >= 1 and machine.memory > 100 << 20


_NVML = """
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
"""


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("0,1,2", 2), ("", 0)])
def test_gpus_are_counted_by_the_drivers_library(tmp_path: Path, visible: str | None, count: int) -> None:
    """With a fake NVML library: a process loads it only if it is on the loader's path."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    (tmp_path / "nvml.c").write_text(_NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nvml.c")], check=True)
    code = "from headrace_cluster.launch.start_checks import this_machine as m; print(m().gpus)"
    environment = {"LD_LIBRARY_PATH": str(tmp_path)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(count)]


@pytest.mark.parametrize(
    ("visible", "count"), [(None, None), ("0,1", None), ("GPU-1", None), ("", 0), ("NoDevFiles", 0)]
)
def test_gpus_are_uncounted_where_only_their_device_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    monkeypatch.setattr(machine, "_UNCOUNTED_GPUS", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpus == count
    monkeypatch.setattr(machine, "_UNCOUNTED_GPUS", ())
    assert this_machine().gpus == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts_without_its_file_cache(tmp_path: Path, version: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 << 20} kB\n")
    assert available_memory(tmp_path) == 64 * GIB
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    group.mkdir(parents=True)
    key = "inactive_file" if version == 2 else "total_inactive_file"
    for name, text in zip(
        (*names, "memory.stat"), (f"{8 * GIB}", f"{7 * GIB}", f"anon 5\n{key} {5 * GIB}\n"), strict=True
    ):
        (group / name).write_text(text)
    assert available_memory(tmp_path) == 6 * GIB
    (group / names[0]).write_text("max\n")
    assert available_memory(tmp_path) == 64 * GIB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("cores", "placed", "ranks", "expected"),
    [
        ({"a": 8.0}, ["a"], 1, 8),
        ({"a": 8.0}, ["a"], 3, 2),
        ({"a": 8.0, "b": 4.0}, ["a", "b"], 2, 4),
        ({"head": 0.0, "a": 8.0}, ["a"], 2, 4),  # none of the two is on the head
        ({"a": 2.0}, ["a"], 5, 1),
        ({"a": 8.0}, ["unknown"], 1, 1),
    ],
)
def test_ranks_of_a_node_share_its_cores(cores: dict[str, float], placed: list[str], ranks: int, expected: int) -> None:
    assert threads_per_rank(cores, placed, ranks) == expected
