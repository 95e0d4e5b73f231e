"""The actor around a replica, without Ray: its report to a controller that did not start it, and its end."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import ray
import ray.util

from headrace_cluster.core.rank_config import NODE_HOST, RankReport, StartArgs, StartOutcome, fingerprint
from headrace_cluster.ray.rank_actor import RankActor
from headrace_worker.core.config import ReplicaConfig
from support.cluster.fake_replica import FakeReplica

CONFIG = ReplicaConfig(replica_id="m-0", generation=4, model="m", source="", secret=b"s" * 32, host=NODE_HOST)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankActor]]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [3])
    made: list[RankActor] = []

    def actor(config: ReplicaConfig = CONFIG) -> RankActor:
        made.append(RankActor(msgspec.msgpack.encode(config), 0, "support.cluster.fake_replica:FakeReplica"))
        return made[-1]

    yield actor
    for each in made:
        each.stop()


def _report(actor: RankActor) -> RankReport:
    return msgspec.msgpack.decode(actor.report(), type=RankReport)


def _start(actor: RankActor) -> None:
    actor.start(msgspec.msgpack.encode(StartArgs()))


def _replica(actor: RankActor) -> FakeReplica:
    replica: FakeReplica = actor._replica
    return replica


def test_the_report_of_a_rank(make: Callable[..., RankActor]) -> None:
    actor = make()
    before = _report(actor)
    assert (before.node, before.gpus, before.started, before.ended) == ("127.0.0.1", ["3"], None, False)
    # Of the controller's config, although the rank has set its own address in it.
    assert before.fingerprint == fingerprint(dataclasses.replace(CONFIG, generation=9))
    _start(actor)
    up = _report(actor)
    assert up.started is not None and up.started.address.startswith("127.0.0.1:")
    assert (up.role, up.draining, up.ended) == ("both", False, False)
    actor.set_role("decode")
    actor.drain()
    assert (_report(actor).role, _report(actor).draining) == ("decode", True)


def test_a_failed_start_is_reported_as_not_started(make: Callable[..., RankActor]) -> None:
    actor = make(dataclasses.replace(CONFIG, model="refuse"))
    outcome = msgspec.msgpack.decode(actor.start(msgspec.msgpack.encode(StartArgs())), type=StartOutcome)
    assert (outcome.final, outcome.lacks_resources) == (True, True), "two builds side by side may be the cause"
    assert _report(actor).started is None


def test_a_wait_ends_with_the_replica_or_in_time(make: Callable[..., RankActor]) -> None:
    actor = make()
    _start(actor)
    began = time.monotonic()
    assert actor.wait(0.1) is None and time.monotonic() - began < 5
    _replica(actor).die("the step loop ended: ValueError")
    assert actor.wait(5) == "the step loop ended: ValueError"
    assert actor.wait(5) == "the step loop ended: ValueError", "a second controller receives it, too"
    assert _report(actor).ended


def test_a_stop_is_reported_as_a_stop(make: Callable[..., RankActor]) -> None:
    actor = make()
    _start(actor)
    actor.stop()
    assert actor.wait(5) == "it was stopped"
