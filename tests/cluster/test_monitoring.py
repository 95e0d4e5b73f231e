"""What probes and Prometheus read of a controller, and of the ranks on a node."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace_cluster.controller.monitoring import LOOK_LIMIT_SECONDS, monitoring_app
from headrace_cluster.errors import SpecError
from headrace_cluster.local import rank_states
from headrace_cluster.local.rank_states import RankState
from headrace_cluster.spec.cluster_spec import parse_spec
from support.cluster.fake_driver import FakeDriver
from support.cluster.fake_loop import controlled

KEY = {"authorization": "Bearer a key of metrics"}


async def _pages(driver: FakeDriver) -> dict[str, Any]:
    async with controlled(driver, replicas=2) as made:
        while not made.planner.ready:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await made.loop._look()
        app = monitoring_app(
            made.loop, made.membership, lambda: ["a problem"], lambda given: given == b"Bearer a key of metrics"
        )
        client = TestClient(app)
        pages = {path: client.get(path, headers=KEY) for path in ("/health", "/health/live", "/metrics")}
        pages["without a key"] = client.get("/metrics")
        made.planner.looked_at -= 2 * LOOK_LIMIT_SECONDS
        pages["while Ray hangs"] = client.get("/health")
    return pages


def test_health_and_metrics_of_a_controller() -> None:
    pages = asyncio.run(_pages(FakeDriver()))
    assert [page.status_code for page in pages.values()] == [200, 200, 200, 401, 503]
    lines = pages["/metrics"].text.splitlines()
    for line in (
        'headrace_replicas{model_name="smollm2",state="ready"} 2.0',
        'headrace_replicas{model_name="smollm2",state="dead"} 0.0',
        'headrace_replicas_wanted{model_name="smollm2"} 2.0',
        'headrace_replicas_outdated{model_name="smollm2"} 0.0',
        'headrace_replica_failures_total{model_name="smollm2"} 0.0',
        "headrace_problems 1.0",
        "headrace_routers 0.0",
    ):
        assert line in lines
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for name in re.findall(r"`(headrace_\w+)`", page.partition("\nOf the controller, by ")[2].partition("\n\n")[0]):
        assert re.search(rf"^{name}[{{ ]", pages["/metrics"].text, re.MULTILINE), name


def test_an_open_port_for_metrics_needs_a_key() -> None:
    assert parse_spec({"control": {"metrics_port": 8005, "host": "127.0.0.1"}}).control.metrics_port == 8005
    with pytest.raises(SpecError, match=r"give a key with control\.metrics_key_file"):
        parse_spec({"control": {"metrics_port": 8005}})


def test_a_node_is_ready_when_its_ranks_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    assert rank_states.waiting() == [], "a node without ranks"
    state = RankState("smollm2-0.g1.r0")
    state.write("starting")
    assert rank_states.waiting() == ["smollm2-0.g1.r0 is starting"]
    state.write("ready")
    assert rank_states.waiting() == []
    (file,) = (tmp_path / "home" / "ranks").iterdir()
    file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1').replace("ready", "starting"))
    assert rank_states.waiting() == [], "the process of that rank has ended"
    RankState("smollm2-1.g1.r0")
    assert not file.exists()
