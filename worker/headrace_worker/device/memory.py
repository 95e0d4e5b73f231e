"""Memory and cores of this machine that can be used, container limits respected. Imports no torch."""

import os
from pathlib import Path

_CGROUPS = (  # limit, usage, statistics
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that processes may still allocate, swap not counted. `root`: where /proc and /sys are."""
    limits = [_meminfo_available(root)]
    for limit_file, usage_file, stat_file in _CGROUPS:
        limit, usage = (_read_int(_below(root, name)) for name in (limit_file, usage_file))
        if limit is not None and usage is not None:
            # Pages of files count as usage, though the kernel reclaims them on demand.
            limits.append(max(0, limit - usage + min(usage, _inactive_file(_below(root, stat_file)))))
    return min(limits)


def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of the machine, or fewer if a container has a CPU quota."""
    cores = os.cpu_count() or 1
    try:  # cgroup v2: "200000 100000", or "max 100000"
        quota, period = map(int, _below(root, "/sys/fs/cgroup/cpu.max").read_text().split())
    except (OSError, ValueError):
        quota, period = (
            _read_int(_below(root, f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us")) or 0 for name in ("quota", "period")
        )
    return min(cores, max(1, -(-quota // period))) if quota > 0 and period > 0 else cores


def _below(root: Path, name: str) -> Path:
    return root / name.lstrip("/")


def _meminfo_available(root: Path) -> int:
    try:
        for line in _below(root, "/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _inactive_file(path: Path) -> int:
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(entries.get("total_inactive_file") or entries.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
