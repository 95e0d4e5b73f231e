"""The actor around a replica, without Ray: its start, its reports to any controller, and its end."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import ray
import ray.util

from headrace_cluster.core.rank_config import NODE_HOST, Binding, RankReport, Stage, config_digest
from headrace_cluster.ray.rank_actor import RankActor
from headrace_proto.role import Role
from headrace_worker.comm.errors import RankLostError
from headrace_worker.core.config import ReplicaConfig
from support.cluster.fake_replica import FakeReplica
from support.members import MEMBER, SECRET

CONFIG = ReplicaConfig(replica_id="m-0", generation=4, model="m", source="", host=NODE_HOST)
FAKE = "support.cluster.fake_replica:FakeReplica"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankActor]]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [3])
    monkeypatch.setattr(os, "environ", os.environ.copy())  # for CUDA_VISIBLE_DEVICES
    made: list[RankActor] = []

    def actor(config: ReplicaConfig = CONFIG) -> RankActor:
        made.append(RankActor(msgspec.msgpack.encode(config), 0, b"digest", "space", FAKE))
        return made[-1]

    yield actor
    for each in made:
        each.stop()


def _report(actor: RankActor) -> RankReport:
    return msgspec.msgpack.decode(actor.report(), type=RankReport)


def _await(actor: RankActor, stage: Stage) -> RankReport:
    """As a controller does: one call after the other, each for a report that it has not seen."""
    report, until = _report(actor), time.monotonic() + 20
    while report.stage is not stage and time.monotonic() < until:
        report = msgspec.msgpack.decode(actor.report(report.version, 5.0), type=RankReport)
    assert report.stage is stage
    return report


def _start(actor: RankActor) -> RankReport:
    actor.set_secret((SECRET,))
    return _await(actor, Stage.READY)


def _replica(actor: RankActor) -> FakeReplica:
    replica: FakeReplica = actor._replica
    return replica


def test_a_rank_starts_by_itself_once_it_has_the_secret_and_reports_each_change(make: Callable[..., RankActor]) -> None:
    actor = make()
    before = _report(actor)
    assert (before.node, before.gpus, before.stage, before.secrets) == ("127.0.0.1", ["3"], Stage.WAITING, ())
    assert before.digest == b"digest"
    assert actor.report(before.version, 0.05) == actor.report(), "nothing has changed"
    up = _start(actor)
    assert up.started is not None and up.started.address.startswith("127.0.0.1:")
    assert (up.role, up.secrets) == ("both", MEMBER.secret.fingerprints)
    actor.set_secret((b"the next secret", SECRET))
    assert _replica(actor).secret.values == (b"the next secret", SECRET), "it serves on with it"
    actor.set_role("decode")
    assert (_report(actor).role, _replica(actor).role) == ("decode", "decode")
    actor.drain(30.0)
    actor.drain(3.0)
    drains = _report(actor)
    assert drains.stage is Stage.DRAINING and _replica(actor).draining
    assert 20.0 < drains.drain_seconds <= 30.0, "of the first call; any controller sees what is left"


def test_a_digest_covers_what_cannot_change_at_run_time() -> None:
    same = dataclasses.replace(CONFIG, generation=7, role=Role.DECODE, cpu_threads=3)
    assert config_digest(same, 0) == config_digest(CONFIG, 0) != config_digest(CONFIG, 1)
    others: list[dict[str, Any]] = [{"tp": 2}, {"source": "n"}, {"replica_id": "m-1"}, {"kv_cache_memory": 1}]
    for change in others:
        assert config_digest(dataclasses.replace(CONFIG, **change), 0) != config_digest(CONFIG, 0)


def test_rank_0_tells_the_others_once_all_are_there(make: Callable[..., RankActor]) -> None:
    """It knows its device before it makes the replica for the rendezvous."""
    actor = make(dataclasses.replace(CONFIG, tp=3))
    actor.set_secret((SECRET,))
    places = ((1, "127.0.0.1", ["5"]), (2, "elsewhere", ["3"]))
    assert actor.meet(*places[0]) == b"" and actor._replica is None
    actor.meet(*places[1])
    _await(actor, Stage.READY)
    found = [msgspec.msgpack.decode(actor.meet(*place), type=Binding) for place in places]
    assert [(binding.visible_gpus, binding.gpu) for binding in found] == [(("3", "5"), 1), (("3",), 0)]
    assert found[0].rendezvous == found[1].rendezvous is not None
    assert (_replica(actor).config.device, os.environ["CUDA_VISIBLE_DEVICES"]) == ("cuda:0", "3,5")


def test_a_rank_without_a_gpu_runs_on_the_cpu(make: Callable[..., RankActor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` would find may belong to another rank."""
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [])
    actor = make()
    _start(actor)
    assert _replica(actor).config.device == "cpu"


def test_a_failed_start_is_reported_with_its_sentence(make: Callable[..., RankActor]) -> None:
    actor = make(dataclasses.replace(CONFIG, model="refuse"))
    actor.set_secret((SECRET,))
    failed = _await(actor, Stage.FAILED)
    assert failed.error.startswith("too little memory")
    assert (failed.final, failed.lacks_resources) == (True, True), "two builds side by side may be the cause"
    first = make(dataclasses.replace(CONFIG, tp=2))
    first._note(stage=Stage.FAILED)
    with pytest.raises(RankLostError):
        first.meet(1, "node", [])


def test_the_end_of_a_replica_is_reported_with_its_cause(make: Callable[..., RankActor]) -> None:
    actor = make()
    _start(actor)
    _replica(actor).die("the step loop ended: ValueError")
    assert _await(actor, Stage.ENDED).error == "the step loop ended: ValueError"
    other = make()
    _start(other)
    other.stop()
    assert _await(other, Stage.ENDED).error == "it was stopped"
