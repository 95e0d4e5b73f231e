"""The smallest cluster of the chart, run: its command lines, variables and files as processes of this machine."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.e2e.headrace_process import eventually
from support.helm.chart import ROOT, render
from support.helm.processes import Release

START_SECONDS = 120
BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """Head, controller, one worker and one router; ready."""
    with tempfile.TemporaryDirectory(prefix="release-", dir="/var/tmp") as folder:
        made = Release(render("minimal"), Path(folder))
        try:
            for pod, container in (
                ("head", "ray-head"),
                ("head", "controller"),
                ("worker-serving", "ray-worker"),
                ("router", "router"),
            ):
                made.start(pod, container)
            eventually(lambda: _ready(made), START_SECONDS, "the readiness probe of the router")
            yield made
        finally:
            made.close()


def _ready(release: Release) -> bool:
    """By the probe of the router, and by its replicas."""
    (router,) = release.pod("router").containers
    probe = router["readinessProbe"]["httpGet"]
    (port,) = [found["containerPort"] for found in router["ports"] if found["name"] == probe["port"]]
    try:
        paths = (probe["path"], "/health/ready")
        answers = [httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5, trust_env=False) for path in paths]
    except httpx.TransportError:
        return False
    return all(answer.status_code == 200 for answer in answers)


def _ask(release: Release) -> str:
    key = release.secret("api-keys").splitlines()[0].rpartition(":")[2]
    answer = httpx.post(
        "http://127.0.0.1:8000/v1/chat/completions",
        json={"model": "smollm2", **BODY},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def test_a_chat_is_answered_over_http(release: Release) -> None:
    assert "Paris" in _ask(release)
    refused = httpx.post("http://127.0.0.1:8000/v1/chat/completions", json=BODY, timeout=60, trust_env=False)
    assert refused.status_code == 401


def test_a_chat_is_answered_over_grpc(release: Release) -> None:
    key = release.secret("api-keys").splitlines()[0].rpartition(":")[2]
    client = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "grpc_client.py")],
        env=os.environ | {"HEADRACE_API_KEY": key, "GRPC_ADDRESS": "127.0.0.1:8001"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Paris" in client.stdout


def _ranks(release: Release) -> list[int]:
    """Processes of ready replicas; none while the controller does not answer."""
    status = release.run("head", "controller", ["headrace", "status", "--json"])
    replicas = json.loads(status.stdout)["replicas"] if status.returncode == 0 else []
    return [rank["pid"] for replica in replicas if replica["state"] == "ready" for rank in replica["ranks"]]


def test_probes_of_the_head_and_the_test_of_helm_pass(release: Release) -> None:
    eventually(lambda: _ranks(release), 60, "a ready replica")
    for path in ("/health", "/metrics"):
        key = release.secret("metrics-key")
        page = httpx.get(
            f"http://{release.address}:8005{path}", headers={"Authorization": f"Bearer {key}"}, trust_env=False
        )
        assert page.status_code == 200 and page.text
    assert 'headrace_replicas{model_name="smollm2",state="ready"} 1.0' in page.text
    (worker,) = release.pod("worker-serving").containers
    ready = release.run("worker-serving", "ray-worker", worker["readinessProbe"]["exec"]["command"])
    assert (ready.returncode, ready.stdout) == (0, "ready\n"), ready.stderr
    answer = httpx.get("http://127.0.0.1:52365/api/healthz", timeout=10, trust_env=False)
    assert answer.status_code == 200, "the probe of Ray's containers needs no token"
    chat = release.run("test", "chat")
    assert chat.returncode == 0 and chat.stdout.strip(), chat.stderr
