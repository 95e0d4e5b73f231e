"""For all tests: a skip that names a package to install is a failure if CI=1 (or true) is set."""

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Set before any test imports torch: the threads of several processes share few cores, and spinning threads block them.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

pytest.register_assert_rewrite("support")
settings.register_profile("headrace", deadline=None)  # no test asserts how fast a loaded machine is
settings.load_profile("headrace")
_INSTALLABLE = re.compile(r"\b(apt-get install|apt install|pip install|npm (install|pack))\b")


HERE = Path(__file__).parent
PROCESSES = (
    "death",
    "guided_ranks",
    "hanging_step",
    "loaded_facts",
    "process_oracle",
    "process_requests",
    "recorded_ranks",
    "rendezvous",
    "transfers",
)
CI = (  # files and folders of tests that take tens of seconds: most start or kill servers or ranks
    "e2e/test_controller_restart.py",
    "e2e/test_process_failures.py",
    "e2e/test_load.py",
    "e2e/test_nodes.py",
    "e2e/test_oracle.py",
    "e2e/test_pools.py",
    "e2e/test_profile.py",
    "e2e/test_ranks.py",
    "e2e/test_roles.py",
    "e2e/test_rollout.py",
    "e2e/test_routers.py",
    "e2e/test_stop.py",
    "e2e/test_tls.py",
    "integration/",
    "kernels/test_build.py",
    "kernels/test_compiles.py",
    "kernels/test_splits.py",
    "simulation/test_router_decisions.py",
    "test_benchmarks.py",
    "test_extending.py",
    "test_gpu_benchmark.py",
    "test_gpu_packages.py",
    "worker/model/test_hostile_files.py",
    "worker/model/test_warmup_coverage.py",
    *(f"worker/parallel/test_{name}.py" for name in PROCESSES if name != "process_oracle"),
)
ALONE = (  # files and folders of tests that run Ray, whole servers, or a model in several processes
    "cluster/test_live_ray.py",
    "cluster/test_local_ray.py",
    "e2e/",
    "integration/",
    "test_benchmarks.py",
    "test_extending.py",
    "test_gpu_benchmark.py",
    *(f"worker/parallel/test_{name}.py" for name in PROCESSES),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by the file that they are in."""
    for item in items:
        name = item.path.relative_to(HERE).as_posix()
        for marker, places in ((pytest.mark.ci, CI), (pytest.mark.alone, ALONE)):
            if name.startswith(places):
                item.add_marker(marker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI", "") not in ("", "0", "false"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _INSTALLABLE.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {reason} (with CI=1 it must be installed)"
    return report
