"""The actor around a replica, without Ray: what it tells a controller that did not start it, how its end is told."""

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import ray
import ray.util
from fake_replica import FakeReplica

from headrace_cluster.rank_actor import RankActor
from headrace_cluster.rank_config import NODE_HOST, RankReport, StartOrder, fingerprint
from headrace_worker.config import ReplicaConfig

CONFIG = ReplicaConfig(replica_id="m-0", generation=4, model="m", source="", secret=b"s" * 32, host=NODE_HOST)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankActor]]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [3])
    made: list[RankActor] = []

    def actor(config: ReplicaConfig = CONFIG) -> RankActor:
        made.append(RankActor(msgspec.msgpack.encode(config), 0, "fake_replica:FakeReplica"))
        return made[-1]

    yield actor
    for each in made:
        each.stop()


def _report(actor: RankActor) -> RankReport:
    return msgspec.msgpack.decode(actor.report(), type=RankReport)


def _start(actor: RankActor) -> None:
    actor.start(msgspec.msgpack.encode(StartOrder()))


def _replica(actor: RankActor) -> FakeReplica:
    replica: FakeReplica = actor._replica
    return replica


def test_a_rank_tells_what_it_is(make: Callable[..., RankActor]) -> None:
    actor = make()
    before = _report(actor)
    assert (before.node, before.gpus, before.started, before.ended) == ("127.0.0.1", ["3"], None, False)
    # Of the config as the controller wrote it, though the rank put its own address in.
    assert before.fingerprint == fingerprint(msgspec.structs.replace(CONFIG, generation=9))
    _start(actor)
    up = _report(actor)
    assert up.started is not None and up.started.address.startswith("127.0.0.1:")
    assert (up.role, up.draining, up.ended) == ("both", False, False)
    actor.set_role("decode")
    actor.drain()
    assert (_report(actor).role, _report(actor).draining) == ("decode", True)


def test_a_start_that_fails_is_no_start(make: Callable[..., RankActor]) -> None:
    actor = make(msgspec.structs.replace(CONFIG, model="refuse"))
    _start(actor)
    assert _report(actor).started is None


def test_a_wait_ends_with_the_replica_or_in_time(make: Callable[..., RankActor]) -> None:
    actor = make()
    _start(actor)
    began = time.monotonic()
    assert actor.wait(0.1) is None and time.monotonic() - began < 5
    _replica(actor).die("the step loop ended: ValueError")
    assert actor.wait(5) == "the step loop ended: ValueError"
    assert actor.wait(5) == "the step loop ended: ValueError", "a second controller is told, too"
    assert _report(actor).ended


def test_a_stop_is_told_as_one(make: Callable[..., RankActor]) -> None:
    actor = make()
    _start(actor)
    actor.stop()
    assert actor.wait(5) == "it was stopped"
