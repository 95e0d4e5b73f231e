"""The controller as a child of `serve`: what happens when it ends or does not answer. The clock is a number."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_cluster.core.view import ControllerConfig, View
from headrace_cluster.errors import ControllerLostError
from headrace_cluster.launch.controller_process import BACKOFF, START_SECONDS, VIEW_SECONDS, ControllerProcess
from headrace_cluster.spec.cluster_spec import parse_spec

VIEW = View(ready=True, fatal="", stop_requested=False, progress=[], started={}, roles={}, routers=[], failures={})


class _Bench:
    """Children that answer, end or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.starts: list[float] = []
        self.answers = True
        monkeypatch.setattr("subprocess.Popen", self._popen)
        spec = parse_spec({"admin": {"port": 0}, "control": {"port": 0}})
        self.process = ControllerProcess(spec, "127.0.0.1", lambda: self.now, lambda: 0.0)
        monkeypatch.setattr(self.process, "_newest", lambda: VIEW if self.answers else None)
        self.process.start(ControllerConfig(spec="{}", admin_key="k", secret_file="s", log_folder="/logs"))

    def _popen(self, *_: object, **__: object) -> Any:
        self.starts.append(self.now)
        self.code: int | None = None
        pipe = SimpleNamespace(write=lambda data: None)
        opened = type("Pipe", (), {"__enter__": lambda _: pipe, "__exit__": lambda *_: None})()

        def end() -> None:
            self.code = -9

        return SimpleNamespace(
            stdin=opened, stdout=[], poll=lambda: self.code, kill=end, wait=lambda *_: self.code, terminate=lambda: None
        )

    def wait(self, seconds: float) -> list[str]:
        """What was shown, with two polls per second."""
        for _ in range(int(seconds * 2)):
            self.process.poll()
            self.now += 0.5
        return self.process.messages()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Bench]:
    made = _Bench(monkeypatch)
    yield made
    made.code = 0
    made.process.__exit__()


def test_views_are_passed_on(bench: _Bench) -> None:
    assert bench.process.poll() == VIEW
    assert bench.wait(100) == [] and len(bench.starts) == 1


def test_one_that_was_never_up_ends_the_start_with_its_log(bench: _Bench) -> None:
    bench.answers, bench.code = False, 1
    with pytest.raises(ControllerLostError, match=r"ended \(exit status 1\); its log: /logs/controller.log"):
        bench.process.poll()


def test_losses_never_end_and_pauses_grow(bench: _Bench) -> None:
    shown = bench.wait(2)
    for _ in range(40):
        bench.code = -9
        shown += bench.wait(BACKOFF.limit + 2)
    assert len(bench.starts) == 41
    assert shown[0] == "the controller's process ended (killed by signal 9); starting another one now, serving goes on"
    assert shown[1] == "a new controller runs"
    bench.wait(200)
    bench.starts.clear()
    for _ in range(400):
        bench.code = -9
        bench.wait(0.5)
    pauses = [after - before for before, after in zip(bench.starts, bench.starts[1:], strict=False)]
    assert pauses[:4] == sorted(pauses[:4]) and min(pauses[4:]) > 5, "losses of two minutes count"


def test_one_that_hangs_is_killed(bench: _Bench) -> None:
    bench.wait(2)
    bench.answers = False
    assert bench.wait(VIEW_SECONDS - 1) == []
    shown = bench.wait(2)
    assert shown == ["the controller does not answer; starting another one now, serving goes on"]
    assert len(bench.starts) == 2
    assert bench.wait(START_SECONDS - 2) == [], "the next one loads its libraries first"
    bench.answers = True
    assert bench.wait(1) == ["a new controller runs"]


def test_the_next_one_has_the_same_ports(bench: _Bench) -> None:
    assert bench.process.spec.admin.port == bench.process.admin_port > 0
    assert bench.process.control_address == f"127.0.0.1:{bench.process.spec.control.port}"
