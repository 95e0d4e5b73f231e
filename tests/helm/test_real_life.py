"""What a rendered release survives: two routers, two workers, and what a cluster does to them, under steady load."""

import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.e2e.headrace_process import eventually
from support.helm.chart import Object, changed, named
from support.helm.clients import Clients
from support.helm.kubectl import CONTROLLER, HEAD, WORKER, Kubectl
from support.helm.processes import Release, has_namespaces
from support.integration.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="this machine lets no process make a mount namespace")
SECONDS = 240
LOOK_SECONDS = 5.0  # between two `headrace status`, each of which is a second of a core that Ray needs to start
ROUTER = ("router", "router")
MODEL: dict[str, Any] = {
    "source": "/models/tiny",
    "name": "tiny",
    "replicas": 2,
    "cpu_share": 2,  # there is room for two replicas in a pod
    "cpu_threads": 1,
    "node_labels": {"headrace.dev/group": "serving"},
}


def _objects(workers: int = 2, tag: str = "", **model: Any) -> tuple[Object, ...]:
    return changed(
        image={"tag": tag},
        models__existingClaim="models",
        spec__models=[MODEL | model],
        spec__limits={"request_seconds": 60},
        workers__serving={"replicas": workers, "drainSeconds": 120},
    )


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """All containers on a read-only root; ready."""
    with tempfile.TemporaryDirectory(prefix="release-", dir="/var/tmp") as folder:
        made = Release(_objects(), Path(folder))
        save_tiny_llama(Path(folder) / "claim-models" / "tiny")
        try:
            made.start(*HEAD)
            eventually(lambda: _head_answers(made), SECONDS, "Ray's head")
            made.start(*CONTROLLER)
            for number in (0, 1):
                made.start(*WORKER, number)
                made.start(*ROUTER, number)
            _await(lambda: _settled(made), "two ready replicas")
            yield made
        except BaseException:
            print(made.log(*CONTROLLER)[-3000:], *(made.log(*WORKER, number)[-1500:] for number in (0, 1)))
            raise
        finally:
            made.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _head_answers(release: Release) -> bool:
    return _answers(f"http://{release.address}:52365/api/healthz")


def _status(release: Release) -> dict[str, Any]:
    """Empty while the controller does not answer."""
    result = release.run(*CONTROLLER, ["headrace", "status", "--json"])
    found: dict[str, Any] = json.loads(result.stdout) if result.returncode == 0 else {}
    return found


def _settled(release: Release, count: int = 2) -> bool:
    replicas = _status(release).get("replicas", [])
    good = [r for r in replicas if r["state"] == "ready" and r["connected"] and not (r["beside"] or r["outdated"])]
    return len(good) == len(replicas) == count


def _await(condition: Callable[[], object], what: str) -> None:
    eventually(condition, SECONDS, what, LOOK_SECONDS)


def _await_settled(release: Release, count: int = 2) -> None:
    try:
        _await(lambda: _settled(release, count), f"{count} settled replicas")
    except AssertionError:
        print(json.dumps(_status(release), indent=1), release.log(*CONTROLLER)[-3000:])
        raise


def _with_text(objects: tuple[Object, ...], old: str, new: str) -> tuple[Object, ...]:
    """With another text in the spec of the cluster, as by `kubectl edit`."""
    found = copy.deepcopy(objects)
    data = named(found, "ConfigMap")["data"]
    assert old in data["cluster.yaml"]
    data["cluster.yaml"] = data["cluster.yaml"].replace(old, new)
    return found


def _builds(release: Release) -> list[tuple[str, int, int]]:
    """Name, generation and process of each replica; no process while it waits for a place."""
    replicas = _status(release)["replicas"]
    return [(r["id"], r["generation"], r["ranks"][0]["pid"] if r["ranks"] else 0) for r in replicas]


def test_a_killed_controller_changes_nothing(release: Release) -> None:
    before = _builds(release)
    with Clients(release, "controller killed"):
        release.kill(*CONTROLLER)
        time.sleep(5)
        release.start(*CONTROLLER)
        _await_settled(release)
    assert _builds(release) == before


def test_a_new_spec_is_rolled_out_and_a_wrong_one_is_refused(release: Release) -> None:
    before = _builds(release)
    with Clients(release, "ConfigMap with another max_num_seqs"):
        release.apply(_objects(max_num_seqs=6))
        _await(lambda: all(now[1] > was[1] for now, was in zip(_builds(release), before, strict=True)), "new builds")
        _await_settled(release)
    rolled = _builds(release)
    assert len({r["ranks"][0]["node"] for r in _status(release)["replicas"]}) == 2, "they are still spread"
    with Clients(release, "ConfigMap with an unknown key"):
        release.apply(_with_text(_objects(max_num_seqs=6), "max_num_seqs: 6", "max_num_sequences: 6"))
        _await(lambda: any("is not used" in each for each in _status(release)["problems"]), "a problem of the spec")
        time.sleep(5)
    assert _builds(release) == rolled
    with Clients(release, "ConfigMap with a folder that is not there"):
        release.apply(_objects(max_num_seqs=6, source="/models/none"))
        _await(lambda: any(r["roll_failed"] for r in _status(release)["replicas"]), "a build that failed")
        time.sleep(5)
    assert [_builds(release)[0][2], _builds(release)[1][2]] == [build[2] for build in rolled]
    release.apply(_objects(max_num_seqs=6))
    _await_settled(release)
    assert _builds(release) == rolled


def test_a_model_is_scaled_down_and_up(release: Release) -> None:
    with Clients(release, "scaled to one replica, and back to two"):
        release.apply(_objects(max_num_seqs=6, replicas=1))
        _await_settled(release, 1)
        release.apply(_objects(max_num_seqs=6))
        _await_settled(release)


def test_the_secret_of_the_cluster_is_replaced_by_the_commands_of_the_runbook(release: Release) -> None:
    before, old = _builds(release), release.secret("cluster-secret")
    with Clients(release, "Secret replaced, in two steps"), Kubectl(release, 2) as kubectl:
        kubectl.follow("Replace the secret of the cluster")
        time.sleep(10)
        release.kill(*CONTROLLER)
        release.start(*CONTROLLER)
        _await_settled(release)
    assert old not in release.secret("cluster-secret") and _builds(release) == before


def test_a_router_that_ends_fails_no_request(release: Release) -> None:
    grace = release.pod("router").spec["terminationGracePeriodSeconds"]
    with Clients(release, "one of two routers ends"):
        assert release.terminate(*ROUTER, grace, 1) == 0
        release.start(*ROUTER, 1)
        time.sleep(15)


def test_a_worker_that_ends_fails_no_stream(release: Release) -> None:
    """Its replica drains, and is built again on the next pod."""
    with Clients(release, "a worker ends under streams", per_second=10, tokens=48):
        time.sleep(2)
        began = time.monotonic()
        status = release.terminate(*WORKER, 120, 1)
        print(f"the worker ended with {status} after {time.monotonic() - began:.0f} s")
        time.sleep(5)
    with Clients(release, "the next worker starts"):
        release.start(*WORKER, 1)
        _await_settled(release)
        eventually(lambda: _answers(release.agent(1)), SECONDS, "the next worker")


@pytest.mark.parametrize("moves", [False, True], ids=["the same address", "another address"])
def test_the_head_is_lost_and_comes_back(release: Release, moves: bool) -> None:
    before = _builds(release)
    with Clients(release, "head lost for 30 s" + ", another address" * moves):
        release.kill(*CONTROLLER)
        release.kill(*HEAD)
        time.sleep(30)
        if moves:
            release.move_head("127.0.0.200")
        release.start(*HEAD)
        eventually(lambda: _head_answers(release), SECONDS, "Ray's head")
        release.start(*CONTROLLER)
        _await_settled(release)
    assert _builds(release) == before


def test_another_image_by_the_commands_of_the_runbook(release: Release) -> None:
    """Two replicas on three pods; the routers are replaced, too."""
    release.apply(_objects(workers=3))
    release.start(*WORKER, 2)
    _await_settled(release)
    before = {build[0]: build[1:] for build in _builds(release)}

    def upgrade(tag: str) -> None:
        release.use_image("9.9")
        old = _templates(release)
        release.apply(_objects(workers=3, tag=tag))
        assert not old & _templates(release), "pods of the old image can be told from those of the new one"
        for number in (0, 1):
            assert release.terminate(*ROUTER, 90, number) == 0
            release.start(*ROUTER, number)
            url = f"http://{release.router_address(number)}:8003/health/accepting"
            eventually(partial(_answers, url), SECONDS, "the next router")

    with Kubectl(release, 3, upgrade) as kubectl, Clients(release, "another image, pods deleted one by one"):
        kubectl.follow("Replace the pods")
    assert len(kubectl.deleted) == 4 and kubectl.deleted[-1].endswith("head")
    _await_settled(release)
    for name, generation, pid in _builds(release):
        assert generation > before[name][0] and pid != before[name][1]
        assert "image-9.9" in psutil.Process(pid).environ()["PYTHONPATH"]


def _templates(release: Release) -> set[str]:
    spec = release.cluster["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return {group["template"]["metadata"]["annotations"]["headrace.dev/template"] for group in groups}
