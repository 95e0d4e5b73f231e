"""Which tests run when, the time per file, and tools that must be there under CI."""

import os
import re
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
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

# Signals that the caller ignores (nohup, a background job) stay ignored here; child processes have the default.
for _signal in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, lambda *_: None)

HERE = Path(__file__).parent
FAULTS = {  # area: files and folders of tests that start servers or ranks, send signals, or wait in real time
    "cluster": (
        "cluster/test_cli_logs.py",
        "cluster/test_cli_replicas.py",
        "cluster/test_control_loop.py",
        "cluster/test_live_ray.py",
        "cluster/test_local_ray.py",
        "cluster/test_operators.py",
        "cluster/test_rank_actor.py",
        "cluster/test_router_process.py",
        "cluster/test_servers.py",
        "cluster/test_signals.py",
        "cluster/test_tls.py",
        "cluster/test_token_check.py",
        "e2e/test_controller_restart.py",
        "e2e/test_nodes.py",
        "e2e/test_routers.py",
    ),
    "serve": (
        "e2e/test_load.py",
        "e2e/test_process_failures.py",
        "e2e/test_profile.py",
        "e2e/test_refusals.py",
        "e2e/test_roles.py",
        "e2e/test_tls.py",
        "integration/",
    ),
    "router": (
        "proto/test_keepalive.py",
        "router/test_membership.py",
        "router/test_shutdown.py",
        "router/test_slow_clients.py",
        "router/test_tls.py",
    ),
    "images": ("deploy/test_built_images.py",),
    "helm": ("helm/test_first_run.py", "helm/test_real_life.py"),
    "ranks": (
        "worker/parallel/test_death.py",
        "worker/parallel/test_device_calls.py",
        "worker/parallel/test_group_containment.py",
        "worker/parallel/test_guided_ranks.py",
        "worker/parallel/test_hanging_step.py",
        "worker/parallel/test_loaded_facts.py",
        "worker/parallel/test_process_oracle.py",
        "worker/parallel/test_process_requests.py",
        "worker/parallel/test_recorded_ranks.py",
        "worker/parallel/test_rendezvous.py",
        "worker/parallel/test_transfers.py",
    ),
    "tools": (
        "kernels/test_build.py",
        "kernels/test_compiles.py",
        "kernels/test_sanitizers.py",
        "kernels/test_splits.py",
        "router/test_schema_suite.py",
        "router/test_agents.py",
        "router/test_templates.py",
        "test_benchmarks.py",
        "test_gpu_benchmark.py",
    ),
}
ALL_FAULTS = tuple(place for places in FAULTS.values() for place in places)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults", nargs="?", const="all", choices=[*FAULTS, "all"], help="the tests of FAULTS, or of one area"
    )
    parser.addoption("--measure", action="store_true", help="only tests that measure time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests, files and folders of faults that the command line names run; else what needs no server of its own."""
    area, measure = config.getoption("faults"), config.getoption("measure")
    tests = {Path(argument.partition("::")[0]).resolve() for argument in config.args if "::" in argument}
    named = tests | {path for argument in config.args if (path := Path(argument).resolve()).is_file()}
    for folder in (path for argument in config.args if (path := Path(argument).resolve()).is_dir()):
        if f"{folder.relative_to(HERE).as_posix() if folder.is_relative_to(HERE) else ''}/".startswith(ALL_FAULTS):
            named |= {item.path for item in items if folder in item.path.parents}
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
            chosen = measures and (measure or item.path in tests)
        elif area:
            chosen = bool(areas) and area in {*areas, "all"}
        else:
            chosen = not areas or item.path in named
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


@pytest.fixture(scope="session")
def need_tool() -> Callable[[str, str], str]:
    """need_tool(name, how to install it): its path; without it the test skips, and with CI=1 it fails."""

    def need(name: str, install: str) -> str:
        path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if path is None:
            sentence = f"{name} is missing: {install}"
            if os.environ.get("CI") == "1":
                pytest.fail(sentence)
            pytest.skip(sentence)
        return path

    return need
