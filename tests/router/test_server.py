"""The router as a process and as a member of a cluster: ports, signals, membership, metrics, pages."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headrace_base.errors import ListenError
from headrace_proto.control_pb2 import Member, MemberList, ModelEntry
from headrace_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from headrace_proto.replica_pb2 import REPLICA_STATE_DRAINING, REPLICA_STATE_READY
from headrace_router.config import RouterConfig
from headrace_router.router_server import RouterServer
from support.members import MEMBER, secret_file

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 3}


class FakeController(ControlServicer):
    """Sends its member list, at first and after every change."""

    def __init__(self) -> None:
        import asyncio

        self.routers: list[Any] = []
        self.left: list[str] = []
        self.list = MemberList(epoch=b"e", version=1)
        self.changed = asyncio.Event()
        self.server: Any = None
        self.port = 0

    async def start(self) -> None:
        options = [("grpc.so_reuseport", 0)]
        self.server = MEMBER.server(options)
        add_ControlServicer_to_server(self, self.server)
        self.port = MEMBER.listen(self.server, f"127.0.0.1:{self.port}")
        await self.server.start()

    async def publish(self, members: MemberList) -> None:
        self.list = members
        self.changed.set()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[MemberList]:
        self.routers.append(request.router)
        try:
            while True:
                yield self.list
                await self.changed.wait()
                self.changed.clear()
        finally:
            self.left.append(request.router.id)


def test_members_come_from_the_controller_and_stay_while_it_is_unreachable(
    harness: Any, make_replica: Any, eventually: Any
) -> None:
    async def make() -> FakeController:
        made = FakeController()
        await made.start()
        return made

    controller = harness.call(make())
    replica = make_replica()
    harness.start([], controller=f"127.0.0.1:{controller.port}", router_id="router-x")
    eventually(lambda: bool(controller.routers))
    info = controller.routers[0]
    assert info.id == "router-x" and info.pid == os.getpid() and info.http.endswith(str(harness.router.http_port))
    with harness.client() as client:
        eventually(lambda: client.get("/health/accepting").status_code == 200)
        assert client.get("/health").status_code == 503, "no replica serves"
        harness.call(replica.start())
        harness.replicas.append(replica)

        def members(version: int, state: Any = REPLICA_STATE_READY, address: str = replica.address) -> MemberList:
            entry = ModelEntry(name="tiny", aliases=["small"], created=1234)
            member = Member(identity=replica.facts().identity, address=address, state=state)
            return MemberList(epoch=b"e", version=version, members=[member], models=[entry])

        harness.call(controller.publish(members(5)))
        eventually(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json={**BODY, "model": "small"}).status_code == 200
        listed = client.get("/v1/models").json()
        assert [(entry["id"], entry["created"], entry["max_model_len"]) for entry in listed["data"]] == [
            ("tiny", 1234, 256),
            ("small", 1234, 256),
        ]
        assert client.get("/v1/models/small").json()["root"] == "tiny"

        harness.call(controller.publish(members(3, address="127.0.0.1:1")))  # older: dropped
        time.sleep(0.1)
        assert client.get("/health").status_code == 200

        harness.call(controller.server.stop(0))
        time.sleep(0.3)
        assert client.post("/v1/completions", json=BODY).status_code == 200

        async def again() -> None:
            controller.list = members(6, REPLICA_STATE_DRAINING)
            await controller.start()

        harness.call(again())
        eventually(lambda: client.get("/health").status_code == 503)
        assert client.post("/v1/completions", json=BODY).json()["error"]["code"] == "no_replica_ready"
    harness.call(controller.server.stop(0))


def test_a_model_without_replicas_answers_503_for_itself_alone(
    harness: Any, make_replica: Any, eventually: Any
) -> None:
    replica = make_replica()
    harness.start([replica])
    member = Member(identity=replica.facts().identity, address=replica.address, state=REPLICA_STATE_READY)
    models = [
        ModelEntry(name="tiny", aliases=["small"]),
        ModelEntry(name="large"),
        ModelEntry(name="drained", drained=True),
    ]

    async def update() -> None:
        harness.router.services.fleet.update(MemberList(members=[member], models=models))

    harness.call(update())
    with harness.client() as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        for name, status in (("tiny", 200), ("small", 200), ("large", 503), ("unknown", 503)):
            assert client.get("/health/ready", params={"model": name}).status_code == status, name
        assert client.post("/v1/completions", json=BODY).status_code == 200
        refused = client.post("/v1/completions", json={**BODY, "model": "large"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_replica_ready"
        drained = client.post("/v1/completions", json={**BODY, "model": "drained"})
        assert drained.status_code == 503 and drained.json()["error"]["code"] == "model_drained"
        assert "drained by the operator" in drained.text and "moment" not in drained.text
        assert "retry-after" not in drained.headers


@pytest.mark.parametrize("name", ["tiny", "org/Small-1:latest"])
def test_an_answer_names_the_model_as_its_request_does(
    harness: Any, make_replica: Any, eventually: Any, name: str
) -> None:
    """Clients look the name of an answer up. The labels of metrics are models, so that their number is bounded."""
    replica = make_replica()
    harness.start([replica])
    chat = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}

    async def update() -> None:
        models = [ModelEntry(name="tiny", aliases=["org/Small-1:latest"])]
        member = Member(identity=replica.facts().identity, address=replica.address, state=REPLICA_STATE_READY)
        harness.router.services.fleet.update(MemberList(members=[member], models=models))

    harness.call(update())
    with harness.client() as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {**BODY, "model": name})):
            assert client.post(path, json=body).raise_for_status().json()["model"] == name
            streamed = client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
            events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
            assert {json.loads(event)["model"] for event in events} == {name}
            assert json.loads(events[-1])["usage"]
        assert set(re.findall(r'model_name="(.*?)"', client.get("/metrics").text)) == {"tiny"}


def test_patterns_are_names_of_models(harness: Any, make_replica: Any, eventually: Any) -> None:
    """An exact name comes before a pattern, and the longest pattern before others; patterns are not listed."""
    replica = make_replica()
    harness.start([replica])
    member = Member(identity=replica.facts().identity, address=replica.address, state=REPLICA_STATE_READY)
    models = [
        ModelEntry(name="tiny", aliases=["claude-*", "claude-*-mini"]),
        ModelEntry(name="other", aliases=["*", "claude-opus"]),
    ]

    async def update() -> None:
        harness.router.services.fleet.update(MemberList(members=[member], models=models))

    harness.call(update())
    names = {
        "claude-sonnet-9": "tiny",
        "claude-opus": "other",
        "gpt": "other",
        "tiny": "tiny",
        "tiny:latest": "other",
        "claude-": "tiny",
        "claude": "other",
    }
    assert {name: harness.router.services.fleet.model(name).name for name in names} == names
    with harness.client() as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        assert client.post("/v1/completions", json={**BODY, "model": "claude-haiku"}).json()["model"] == "claude-haiku"
        listed = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
        assert listed == ["other", "claude-opus", "tiny"]
        assert client.get("/v1/models/claude-haiku").json()["root"] == "tiny"
        assert client.get("/health/ready", params={"model": "claude-haiku"}).status_code == 200


def _metric(text: str, name: str) -> dict[str, float]:
    """Samples of a metric, by their labels as written."""
    lines = [line for line in text.split("\n") if line.startswith(name + "{") or line.startswith(name + " ")]
    return {line[len(name) :].rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics_have_the_names_of_the_field_and_are_fresh(harness: Any, make_replica: Any, eventually: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    labels = '{model_name="tiny",replica="r0"}'
    with harness.client() as client:
        client.post("/v1/completions", json=BODY)
        client.get("/nowhere")
        replica.load.running, replica.load.kv_usage = 7, 0.5
        replica.load.counters.generation_tokens = 41

        def scrape() -> str:
            return client.get("/metrics").text

        eventually(lambda: _metric(scrape(), "vllm:num_requests_running")[labels] == 7)
        text = scrape()
        assert _metric(text, "vllm:kv_cache_usage_perc")[labels] == 0.5
        assert _metric(text, "vllm:generation_tokens_total")[labels] == 41
        assert _metric(text, "headrace_kv_blocks_free")[labels] == 75
        assert _metric(text, "vllm:time_to_first_token_seconds_count")[labels] == 1
        assert _metric(text, "vllm:inter_token_latency_seconds_count")[labels] >= 1
        assert _metric(text, "headrace_request_errors_total")['{code="not_found",status="404"}'] == 1
        assert _metric(text, "headrace_migrations_total")['{model_name="tiny"}'] == 0, "a rate needs its first zero"
        reasons = _metric(text, "vllm:request_success_total")
        assert [one for one, count in reasons.items() if count] == [
            '{finished_reason="length",model_name="tiny",replica="r0"}'
        ]
        assert 'block_size="16"' in next(iter(_metric(text, "vllm:cache_config_info")))
        for name in (
            "vllm:num_requests_waiting",
            "vllm:prompt_tokens_total",
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:num_preemptions_total",
            "vllm:e2e_request_latency_seconds_count",
            "vllm:request_queue_time_seconds_count",
            "vllm:request_time_per_output_token_seconds_count",
        ):
            assert labels in _metric(text, name), name

        harness.call(replica.kill())
        again = make_replica(address=replica.address, boot_id=b"c" * 16)
        again.load.counters.generation_tokens = 2
        harness.call(again.start())
        harness.replicas.append(again)
        eventually(lambda: _metric(scrape(), "vllm:generation_tokens_total")[labels] == 43)  # never decreases


def test_pages_load_nothing_from_outside(shared: Any) -> None:
    with shared.client() as client:
        page = client.get("/docs")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text and "https://" not in page.text
        for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            assert client.get(path).status_code == 200, path
        document = client.get("/openapi.json").json()
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["$ref"].rsplit("/", 1)[-1] in document["components"]["schemas"]
        text = json.dumps(document)
        names = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
        assert names <= set(document["components"]["schemas"])
        assert set(client.get("/version").json()) == {"version"}
        assert client.head("/health").status_code == 200


def test_a_port_in_use_is_one_sentence(harness: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for fields in ({"port": port, "grpc_port": 0}, {"port": 0, "grpc_port": port}):

            async def start(fields: dict[str, Any] = fields) -> None:
                await RouterServer(RouterConfig(secret_file=secret_file(), **fields)).start()

            with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}"):
                harness.call(start())


CHILD = """
import sys
from headrace_router.config import RouterConfig
from headrace_router.core.fleet import Fleet
from headrace_base.logs import LogConfig
from headrace_router.main import run
logs = LogConfig("router", format="json")
sys.exit(run(RouterConfig(host=sys.argv[1], port=int(sys.argv[2]), grpc_port=0, secret_file=sys.argv[3], logs=logs)))
"""


def test_the_process_starts_without_torch_and_stops_on_sigterm() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = CHILD + "\n"
    barred = "import sys\nfor name in ('torch', 'ray', 'transformers', 'headrace_worker'): sys.modules[name] = None\n"
    child = subprocess.Popen(
        [sys.executable, "-c", barred + code, "127.0.0.1", str(port), str(secret_file())],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        for _ in range(200):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health/live", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 0, err
    assert out == b"" and all(json.loads(line)["part"] == "router" for line in err.decode().strip().split("\n"))


def test_the_process_refuses_to_listen_on_all_interfaces_without_keys() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "0.0.0.0", "0", str(secret_file())], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "without API keys" in done.stderr and "Traceback" not in done.stderr
