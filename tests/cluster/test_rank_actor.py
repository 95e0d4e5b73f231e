"""The actor around a replica, without Ray: its report to a controller that did not start it, and its end."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import ray
import ray.util
from hypothesis import given, settings

from headrace_cluster.core.rank_config import (
    NODE_HOST,
    RankReport,
    StartArgs,
    StartOutcome,
    fingerprint,
)
from headrace_cluster.ray.rank_actor import RankActor
from headrace_worker.core.config import ReplicaConfig
from support.cluster.fake_replica import FakeReplica
from support.hostile_messages import damaged
from support.members import MEMBER, SECRET

CONFIG = ReplicaConfig(replica_id="m-0", generation=4, model="m", source="", host=NODE_HOST)


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
    actor.set_secret((SECRET,))
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
    assert (before.secrets, up.secrets) == ((), MEMBER.secret.fingerprints)
    actor.set_secret((b"the next secret", SECRET))
    assert _replica(actor).secret.values == (b"the next secret", SECRET), "it serves on with it"
    actor.set_role("decode", 1)
    assert up.held is None
    actor.drain(False)
    assert (_report(actor).role, _report(actor).draining, _report(actor).held) == ("decode", True, False)
    actor.drain(True)
    assert _report(actor).held is True


def test_a_call_for_a_role_that_arrives_late_changes_nothing(make: Callable[..., RankActor]) -> None:
    actor = make()
    _start(actor)
    assert _report(actor).role_number == 0
    for role, number, expected in (("decode", 2, "decode"), ("prefill", 1, "decode"), ("both", 2, "both")):
        actor.set_role(role, number)
        assert (_report(actor).role, _replica(actor).role, _report(actor).role_number) == (expected, expected, 2)


def test_arguments_that_are_no_messages_change_nothing(make: Callable[..., RankActor]) -> None:
    actor = make()
    before = _report(actor)
    arguments = msgspec.msgpack.encode(StartArgs(visible_gpus=("0",)))

    @settings(max_examples=100, deadline=None)
    @given(damaged(arguments))
    def check(started: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # Ray passes it to the caller
            actor.start(started[:-1])
        assert _report(actor) == before

    check()
    _start(actor)


@pytest.mark.parametrize(
    ("arguments", "device", "visible"),
    [
        (StartArgs(visible_gpus=("4", "6"), gpu=1), "cuda:1", "4,6"),
        (StartArgs(), "cpu", None),  # what `auto` would find may belong to another rank
    ],
)
def test_the_device_is_known_before_the_replica_is_made(
    make: Callable[..., RankActor],
    arguments: StartArgs,
    device: str,
    visible: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 of several makes it for its rendezvous, before its start."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    actor = make()
    opened = msgspec.msgpack.decode(actor.open_rendezvous(msgspec.msgpack.encode(arguments)), type=StartOutcome)
    assert opened.rendezvous is not None
    assert _replica(actor).config.device == device
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


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
