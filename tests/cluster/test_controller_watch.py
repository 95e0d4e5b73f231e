"""A call of Ray that waits for a GCS without an answer keeps one thread, and nothing else."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace_cluster.core.view import ControllerArgs, View
from headrace_cluster.errors import ControllerLostError, ControllerTakenError, ReplicaFailedError
from headrace_cluster.launch import running_cluster
from headrace_cluster.launch.controller_watch import ControllerWatch
from headrace_cluster.launch.running_cluster import RunningCluster
from headrace_cluster.launch.serve import Serve
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.ray import cluster_record, controller_handle, local_ray
from headrace_cluster.ray.connection import OwnRay, RayConnection
from headrace_cluster.ray.local_ray import RayLink
from headrace_cluster.spec.cluster_spec import parse_spec
from support.e2e.headrace_process import eventually

VIEW = View(
    ready=True, fatal="", stop_requested=False, progress=[], started={}, roles={}, routers=[], failures={}, in_flight=3
)


class _Controller:
    """Its calls wait while `answers` is not set."""

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.restarts = 0

    def poll(self) -> View:
        if self.lost is not None:
            raise self.lost
        return VIEW

    def restart(self) -> None:
        self.restarts += 1
        self.answers.wait()
        if isinstance(self.lost, ControllerTakenError):
            raise self.lost
        self.lost = None


@pytest.fixture
def controller() -> Iterator[_Controller]:
    made = _Controller()
    yield made
    made.answers.set()


@pytest.fixture
def watch(controller: _Controller) -> Iterator[ControllerWatch]:
    made = ControllerWatch(controller, poll_seconds=0.01)
    yield made
    made.end()


def _lose(controller: _Controller) -> None:
    """From now on a restart waits."""
    controller.answers.clear()
    controller.lost = ControllerLostError("it ended")
    eventually(lambda: controller.restarts, 10, "a restart")


def test_views_and_messages_are_passed_on(controller: _Controller, watch: ControllerWatch) -> None:
    eventually(lambda: watch.poll() == VIEW, 10)
    controller.lost = ControllerLostError("it ended")
    found: list[str] = []

    def runs_again() -> bool:
        found.extend(watch.messages())
        return "a new controller runs" in found

    eventually(runs_again, 10)
    assert found[0].startswith("it ended; starting another one")
    assert watch.stop(10), "a thread that does not wait ends"
    polled = [watch.poll(), watch.poll()]
    assert polled[1] is None, "a view is returned once"


def test_a_cluster_of_another_process_ends_the_loop(controller: _Controller, watch: ControllerWatch) -> None:
    controller.lost = ControllerTakenError("taken")

    def taken() -> bool:
        try:
            watch.poll()
        except ControllerTakenError:
            return True
        return False

    eventually(taken, 10)


def test_a_restart_that_waits_keeps_neither_poll_nor_stop(controller: _Controller, watch: ControllerWatch) -> None:
    _lose(controller)
    watch.poll()  # one view may be left
    assert watch.poll() is None
    assert not watch.stop(0.05) and controller.restarts == 1, "one at a time"
    controller.answers.set()
    assert watch.stop(10)


def test_routers_secrets_and_stops_are_watched_while_a_restart_waits(
    controller: _Controller, watch: ControllerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_cluster, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(running_cluster, "show_message", lambda *words, **facts: None)
    calls: list[str] = []

    def restarted(*, serving: bool) -> list[str]:
        calls.append("routers")
        return []

    def reread() -> bool:
        calls.append("secrets")
        return False

    routers: Any = SimpleNamespace(watch=restarted)
    secrets: Any = SimpleNamespace(reread=reread)
    ray: Any = SimpleNamespace(check=list)
    _lose(controller)
    stop, cluster = threading.Event(), RunningCluster(ray, watch, routers, secrets)
    running = threading.Thread(target=cluster.watch, args=(stop,), daemon=True)
    running.start()
    eventually(lambda: calls.count("routers") > 20 and calls.count("secrets") > 20, 10, "that both are watched")
    stop.set()
    running.join(10)
    assert not running.is_alive() and controller.restarts == 1


class _Starting:
    """A cluster that starts: what its display, record and routers get, a view per round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *views: View) -> None:
        self.views = list(views)
        self.calls: list[str] = []
        monkeypatch.setattr(running_cluster, "START_SECONDS", 0)
        self.shown: list[str] = []
        monkeypatch.setattr(running_cluster, "show_message", lambda text, *_, **__: self.shown.append(text))

    def note(self, call: str, result: Any = None) -> Callable[..., Any]:
        def noted(*_: object, **__: object) -> Any:
            self.calls.append(call)
            return result

        return noted

    def run(self, *, owned: bool = False) -> None:
        routers: Any = SimpleNamespace(
            watch=self.note("routers", []), places=lambda known: list(known), ready=lambda places: True
        )
        secrets: Any = SimpleNamespace(reread=self.note("secrets", False))
        ray: Any = SimpleNamespace(check=list, link=SimpleNamespace(owned=owned))
        polled: Any = SimpleNamespace(poll=lambda: self.views.pop(0), messages=list)
        display: Any = SimpleNamespace(update=lambda *_: None)
        record: Any = SimpleNamespace(add_routers=lambda places: None)
        RunningCluster(ray, polled, routers, secrets).await_ready(display, record, self.note("serving"))


def test_clients_are_served_from_the_first_ready_replica_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a second one that loads, or waits for a place without end, kept the first one's requests from a stop."""
    none = View(ready=False, fatal="", stop_requested=False, progress=[], started={}, roles={}, routers=[], failures={})
    started: Any = {"m-0": SimpleNamespace()}
    one = View(
        ready=False, fatal="", stop_requested=False, progress=[], started=started, roles={}, routers=[], failures={}
    )
    starting = _Starting(monkeypatch, none, one, VIEW)
    starting.run()
    watched = ["routers", "secrets"]
    assert starting.calls == [*watched, *watched, "serving", *watched]


def test_a_late_replica_that_cannot_start_ends_none_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = msgspec.structs.replace(VIEW, ready=False, unable={"m-1": "too little memory"})
    started: Any = {"m-0": SimpleNamespace()}
    serving = msgspec.structs.replace(failed, started=started)
    starting = _Starting(monkeypatch, serving, serving, VIEW)
    starting.run(owned=True)
    assert starting.shown == ["too little memory"]
    with pytest.raises(ReplicaFailedError, match="too little memory"):
        _Starting(monkeypatch, msgspec.structs.replace(failed, started={})).run(owned=True)


@pytest.mark.parametrize("destroys", [True, False])
def test_a_ray_in_a_call_of_another_thread_is_not_shut_down(*, destroys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are killed by their mark instead, and what is in a joined one ends by name, within seconds."""
    ended: list[str] = []
    record = SimpleNamespace(keeper=lambda: None, save_keeper=lambda keeper: None)
    monkeypatch.setattr(cluster_record, "ClusterRecord", lambda cluster: record)
    monkeypatch.setattr(controller_handle, "_exists", lambda cluster: True)
    monkeypatch.setattr(controller_handle, "_is_watched", lambda cluster: False)
    monkeypatch.setattr(controller_handle, "_check_secrets", lambda cluster, secrets: None)
    monkeypatch.setattr(controller_handle.ControllerHandle, "_end", lambda self: None)
    monkeypatch.setattr(controller_handle.ControllerHandle, "_create", lambda self: ended.append("created"))
    monkeypatch.setattr(controller_handle.ControllerHandle, "close", lambda self: ended.append("close"))
    monkeypatch.setattr(RayConnection, "force_end", lambda self: ended.append("by name"))
    monkeypatch.setattr(local_ray, "disconnect", lambda: ended.append("disconnect"))
    ray = RayConnection(parse_spec({}), RayLink(owned=False, dashboard="", address="127.0.0.1:1"))
    args: Any = ControllerArgs(spec=parse_spec({}).model_dump_json(), program="", loopback=True)
    with ray, controller_handle.ControllerHandle(parse_spec({}), args, ClusterSecrets(None), "key", ray, {}) as handle:
        ray.blocked, ray.stop_requested = True, destroys
        with pytest.raises(ControllerLostError, match="this process ends"):
            handle.restart()
    assert ended == (["created", "by name"] if destroys else ["created"])


def test_our_own_ray_in_a_call_of_another_thread_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnRay, "alive", True)
    own = object.__new__(OwnRay)
    assert own.ends_in_order(None)
    own.blocked = True
    assert not own.ends_in_order(None)


def test_only_the_loss_of_the_replicas_aborts_requests_in_flight_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas serve on without Ray's GCS."""
    aborts: list[Callable[[], bool]] = []
    dead: list[str] = []
    monkeypatch.setattr(local_ray, "dead_processes", lambda: dead)
    routers = SimpleNamespace(stop=lambda abort: aborts.append(abort), start=lambda: None)
    monkeypatch.setattr("headrace_cluster.launch.serve.RouterGroup", lambda *args: routers)
    launched: Any = Serve(parse_spec({}))
    launched._record = SimpleNamespace(state=SimpleNamespace(control_address=""))
    with contextlib.ExitStack() as stack:
        launched._start_routers(object.__new__(OwnRay), SimpleNamespace(path=None), stack)
    (abort,) = aborts
    assert not abort()
    dead.append("gcs_server")
    assert not abort()
    dead.append("raylet")
    assert abort()


def test_a_forced_end_shows_why_this_process_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stop that takes too long is no success of a server that fails."""

    class _EndedError(BaseException):
        pass

    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise _EndedError

    monkeypatch.setattr("os._exit", end)
    for failure in (ControllerTakenError("another process has taken over"), None):
        serve = Serve(parse_spec({}))
        serve._signals.enter_serving()
        serve._failure = failure
        with pytest.raises(_EndedError):
            serve._force()
    assert statuses == [1, 0] and "another process has taken over" in capsys.readouterr().err
