"""Which tests run when, the time per file, and tools that must be there under CI."""

import os
import re
from collections import defaultdict
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
FAULTS = {  # area: files and folders of tests that start servers or ranks, send signals, or wait in real time
    "cluster": (
        "cluster/test_local_ray.py",
        "cluster/test_live_ray.py",
        "e2e/test_controller_restart.py",
        "e2e/test_nodes.py",
        "e2e/test_rollout.py",
        "e2e/test_routers.py",
        "e2e/test_two_releases.py",
        "integration/test_two_releases.py",
    ),
    "serve": (
        "e2e/test_load.py",
        "e2e/test_long_pauses.py",
        "e2e/test_pools.py",
        "e2e/test_process_failures.py",
        "e2e/test_profile.py",
        "e2e/test_ranks.py",
        "e2e/test_refusals.py",
        "e2e/test_roles.py",
        "e2e/test_stop.py",
        "e2e/test_tls.py",
        "e2e/test_unauthenticated.py",
        "integration/",
    ),
    "ranks": tuple(
        f"worker/parallel/test_{name}.py"
        for name in (
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
    ),
    "router": (
        "router/test_docs_page.py",
        "router/test_failures.py",
        "router/test_request_heads.py",
        "router/test_slow_clients.py",
    ),
    "templates": tuple(f"router/test_template_{name}.py" for name in ("bounds", "costs", "nesting")),
    "tools": (
        "kernels/test_build.py",
        "kernels/test_compiles.py",
        "kernels/test_sanitizers.py",
        "kernels/test_splits.py",
        "test_benchmarks.py",
        "test_extending.py",
        "test_gpu_benchmark.py",
        "test_gpu_packages.py",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults", nargs="?", const="all", choices=[*FAULTS, "all"], help="the tests of FAULTS, or of one area"
    )
    parser.addoption("--measure", action="store_true", help="only tests that measure time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that the command line names run whole; without names, only what needs no server of its own."""
    area, measure = config.getoption("faults"), config.getoption("measure")
    named = any(Path(argument.partition("::")[0]).resolve() != HERE for argument in config.args)
    wanted: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        name = item.path.relative_to(HERE).as_posix()
        areas = {area for area, places in FAULTS.items() if name.startswith(places)}
        areas |= {mark.args[0] for mark in item.iter_markers("faults")}
        measures = item.get_closest_marker("measure") is not None
        if areas or measures:
            item.add_marker(pytest.mark.timeout(600))
        if measure or measures:
            chosen = measure and measures
        elif area:
            chosen = bool(areas) and area in {*areas, "all"}
        else:
            chosen = named or not areas
        (wanted if chosen else others).append(item)
    items[:] = wanted
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file runs whole in one process; the files that share the one server of e2e/ in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "e2e" if "/e2e/" in nodeid else nodeid.partition("::")[0]

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Seconds per file: the ten slowest ones, of --faults all."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    slowest = sorted(seconds, key=lambda name: -seconds[name])
    terminalreporter.section("seconds per file")
    for name in slowest if terminalreporter.config.getoption("faults") else slowest[:10]:
        terminalreporter.write_line(f"{seconds[name]:7.1f}  {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI", "") not in ("", "0", "false"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _INSTALLABLE.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {reason} (with CI=1 it must be installed)"
    return report
