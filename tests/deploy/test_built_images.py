"""The images, built and run as their user: a server in the worker's, a router of its own in the router's."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from support.deploy.images import Container, build, container, megabytes
from support.e2e.headrace_process import eventually
from support.helm.chart import CI_FILES, ROOT, pods, render
from support.ports import free_port

BODY = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
ROUTER_MEGABYTES = 400
SLIM_MEGABYTES = 125  # python:3.12-slim, in place of the tests' own base
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="buildah mounts containers as root alone")


@pytest.fixture(scope="module")
def images(need_tool: Callable[[str, str], str]) -> dict[str, str]:
    """The names of the images by their targets; minutes the first time."""
    for tool in ("buildah", "debootstrap"):
        need_tool(tool, f"apt-get install -y {tool}")
    return {target: build(target) for target in ("router", "worker-cpu")}


@pytest.fixture(scope="module")
def containers(images: dict[str, str]) -> Iterator[dict[str, Container]]:
    """One container of each image."""
    with ExitStack() as stack:
        yield {target: stack.enter_context(container(name)) for target, name in images.items()}


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _chat(url: str) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.timeout(1800)
def test_a_server_and_a_router_of_its_own_answer(containers: dict[str, Container], tmp_path: Path) -> None:
    ports = [str(free_port()) for _ in range(7)]
    http, grpc, admin, control, other, other_grpc, _ = ports
    secret = "/tmp/cluster-secret"
    for made in containers.values():
        file = Path(f"{made.root}{secret}")
        file.write_text("a secret of the cluster, for the test of the images\n")
        file.chmod(0o400)
        shutil.chown(file, 10001, 10001)
    containers["worker-cpu"].start(
        "headrace", "serve", "--port", http, "--grpc-port", grpc, "--admin-port", admin, "--control-port", control,
        "--secret-file", secret, "--max-model-len", "512", "--kv-cache-memory", "256MiB", log=tmp_path / "serve.log",
    )  # fmt: skip
    containers["router"].start(
        "headrace", "router", "--controller", f"127.0.0.1:{control}", "--secret-file", secret, "--port", other,
        "--grpc-port", other_grpc, log=tmp_path / "router.log",
    )  # fmt: skip
    for port in (http, other):
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda url=url: _answers(url), 180, "a server that is ready")  # type: ignore[misc]
        except BaseException:
            for log in tmp_path.glob("*.log"):
                print(log.name, log.read_text()[-3000:])
            raise
        assert "Paris" in _chat(url)
    assert containers["worker-cpu"].run("id", "-u") == "10001"


def test_the_images_have_the_commands_of_compose_and_the_chart(containers: dict[str, Container]) -> None:
    help_of = {target: made.run("headrace", "--help") for target, made in containers.items()}
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    commands = {("worker-cpu", ("headrace", *map(str, compose["services"]["headrace"]["command"])))}
    for values in CI_FILES:
        for pod in pods(render(values)):
            for found in pod.containers:
                target = found["image"].rpartition("headrace-")[2].partition(":")[0]
                if target in containers:
                    probes = (found.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness"))
                    lines = [found.get("command"), *(probe.get("exec", {}).get("command") for probe in probes)]
                    commands |= {(target, tuple(line)) for line in lines if line}
    commands |= {("worker-cpu", (program,)) for program in ("ray", "bash")}  # KubeRay's own lines
    assert {program for _, (program, *_) in commands} >= {"headrace", "python", "ray"}
    for target, (program, *arguments) in sorted(commands):
        assert containers[target].run("which", program), (target, program)
        if program == "headrace":
            assert re.search(rf"\b{arguments[0]}\b", help_of[target]), (target, arguments)
        if program == "python" and arguments[0] == "-m":
            containers[target].run("python", "-c", f"import importlib.util as i; assert i.find_spec('{arguments[1]}')")


def test_the_router_is_small(images: dict[str, str]) -> None:
    base = megabytes("localhost/headrace-test-base")
    own = megabytes(images["router"]) - base
    assert own + SLIM_MEGABYTES <= ROUTER_MEGABYTES, f"{own:.0f} MB over the base"
