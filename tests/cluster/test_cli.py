"""The command line as a process: exit status, streams, and the modules that client commands load."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from headrace_cluster.cli.api_client import ApiClient
from headrace_cluster.errors import NotRunningError, ServerError
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId

HEAVY = ("torch", "ray", "transformers", "fastapi", "uvicorn", "grpc", "headrace_worker.model", "headrace_kernels")


def _run(*arguments: str, stdin: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace_cluster", *arguments]
    environ = os.environ | environment
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=30, env=environ, check=False)


def _imported(*arguments: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-m", "headrace_cluster", *arguments]
    errors = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr
    lines = (line for line in errors.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("status",), ("chat", "--once", "x"), ("config", "show")],
)
def test_client_commands_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    modules = _imported(*arguments)
    assert "typer" in modules
    heavy = {name for name in modules if name.split(".")[0] in HEAVY or name in HEAVY}
    assert heavy == set()
    assert "prompt_toolkit" not in modules, "only a chat on a terminal has a line editor"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--no-such-flag",), 2, "No such option"),
        (("serve", "--replica", "2"), 2, "--replicas"),
        (("serve", "--replicas", "many"), 2, "'--replicas': Input should be a valid integer"),
        (("serve", "--replicas", "0"), 2, "--replicas: Input should be greater than or equal to 1"),
        (("serve", "--tensor-parallel-size", "2"), 2, "no such option --tensor-parallel-size; here it is --tp"),
        (("serve", "-f", "/nowhere.yaml"), 2, "cannot be read"),
        (("serve", "/no/such/model", "--admin-port", "0", "--port", "0", "--grpc-port", "0"), 1, "no model at"),
        (("serve", "--host", "0.0.0.0"), 1, "--allow-no-auth"),
        (("router",), 2, "--controller"),
        (("router", "--controller", "127.0.0.1:1"), 2, "--secret-file FILE"),
        (("router", "--controller", "127.0.0.1:1", "--secret-file", "/nowhere"), 1, "cannot be read"),
        (("controller", "tiny"), 2, "--secret-file FILE"),
        (("stop",), 1, "./headrace serve"),
        (("role", "m-0"), 2, "prefill|decode|both"),
        (("chat", "--once", "x", "--port", "1"), 1, "./headrace serve"),
        (("chat", "--once", "x", "--port", "70000"), 1, "no server answers at 127.0.0.1:70000"),
        (("chat", "--once", "x", "--api-key", "ключ"), 2, "printable ASCII"),
        (("statu",), 2, "Did you mean 'status'"),
    ],
)
def test_failures_are_described_on_stderr(arguments: tuple[str, ...], status: int, words: str) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_config_show_is_a_config(tmp_path: Path) -> None:
    done = _run("config", "show", "a/b", "--tp", "2", HEADRACE_PORT="9000")
    assert done.returncode == 0
    document = yaml.safe_load(done.stdout)
    assert (document["models"][0]["source"], document["models"][0]["tp"]) == ("a/b", 2)
    assert document["routers"]["port"] == 9000
    (tmp_path / "c.yaml").write_text(done.stdout)
    assert _run("config", "show", "-f", str(tmp_path / "c.yaml")).stdout == done.stdout


def test_config_show_hides_keys() -> None:
    done = _run("config", "show", HEADRACE_API_KEYS="very-secret-key")
    assert done.returncode == 0 and "very-secret-key" not in done.stdout + done.stderr


def test_config_schema_is_json() -> None:
    schema = json.loads(_run("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert {"models", "routers", "auth", "limits"} <= set(schema["properties"])
    tp = schema["$defs"]["PoolSpec"]["properties"]["tp"]
    assert (tp["flag"], tp["help"]) == ("--prefill-tp, --decode-tp", "--tp of the prefill or decode pool")
    assert "{pool}" not in json.dumps(schema)


STATUS = {
    "replicas": [
        {
            "id": "tiny-0",
            "model": "tiny",
            "role": "decode",
            "tp": 4,
            "pp": 2,
            "state": "ready",
            "load": {"running": 3, "waiting": 0, "kv_usage": 0.125},
            "ranks": [{"rank": rank, "device": "cuda:0", "node": "10.0.0.1", "pid": 4_000 + rank} for rank in range(8)],
            "note": "a note",
            "beside": [{"generation": 1, "state": "draining", "note": ""}],
            "roll_failed": "a bad file",
        }
    ],
    "problems": ["a problem"],
    "routers": [],
}
PROFILE = {
    "id": "tiny-0",
    "generation": 1,
    "traces": [
        {"rank": 0, "node": "10.0.0.1", "path": "/p/[x]-r0.gz", "steps": 5, "seconds": 0.5, "note": "5 of 40 steps"},
        {"rank": 1, "node": "10.0.0.2", "error": "no step ran"},
    ],
    "operators": [{"name": "aten::mm", "calls": 7, "milliseconds": 12.3456, "share": 0.815, "on_device": False}],
}


class FakeServer:
    """Responds like a router and an admin API; records the requests."""

    def __init__(self) -> None:
        outer = self
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.broken = False
        self.key = ""  # "" = no key needed

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.respond(self)

            def do_POST(self) -> None:
                outer.respond(self)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, daemon=True).start()

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.requests.append((handler.path, dict(handler.headers), body))
        if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            self._send(handler, 401, json.dumps({"error": {"message": "Send a valid API key in the header."}}))
        elif handler.path == "/v1/models":
            self._send(handler, 200, json.dumps({"data": [{"id": "tiny"}]}))
        elif handler.path == "/status":
            self._send(handler, 200, json.dumps(STATUS))
        elif handler.path == "/profile" and not self.broken:
            self._send(handler, 200, json.dumps(PROFILE))
        elif self.broken:
            self._send(handler, 400, json.dumps({"error": {"message": "the prompt is too long"}}))
        else:
            deltas = [{"role": "assistant", "content": ""}, {"content": "Grüß"}, {"content": " Gott"}, {}]
            events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
            usage = json.dumps({"choices": [], "usage": {}})
            text = ": keep-alive\n\n" + "".join(f"data: {event}\n\n" for event in (*events, usage, "[DONE]"))
            self._send(handler, 200, text)

    def _send(self, handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(text.encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def test_chat_once(server: FakeServer) -> None:
    options = ("--port", str(server.port), "--system", "be brief", "--max-tokens", "5", "--api-key", "key-12345")
    done = _run("chat", "--once", "Hallo", *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Grüß Gott\n", "")
    path, headers, body = server.requests[-1]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer key-12345")
    assert json.loads(body) == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hallo"}],
        "max_tokens": 5,
        "stream": True,
    }


def test_chat_takes_standard_input_as_one_message(server: FakeServer) -> None:
    done = _run("chat", "--model", "m", stdin="/help\nzwei\n\n", HEADRACE_PORT=str(server.port))
    assert (done.returncode, done.stdout, done.stderr) == (0, "Grüß Gott\n", "")
    assert [json.loads(body)["messages"][-1]["content"] for _, _, body in server.requests] == ["/help\nzwei"]
    empty = _run("chat", "--model", "m", HEADRACE_PORT=str(server.port))
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "")


def test_chat_prints_the_servers_sentence(server: FakeServer) -> None:
    server.broken = True
    done = _run("chat", "--once", "x", "--port", str(server.port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "headrace: the prompt is too long\n"


def test_a_rejected_key_names_the_flag(server: FakeServer) -> None:
    server.key = "key-12345"
    for key in (None, "wrong-key"):
        with pytest.raises(ServerError, match="pass --api-key KEY or set HEADRACE_API_KEY"):
            ApiClient("127.0.0.1", server.port, key).models()
    assert ApiClient("127.0.0.1", server.port, server.key).models() == ["tiny"]


def test_a_port_without_a_server_lists_running_servers() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    state.save(
        state.ServeState(
            me.pid, me.started, "blue", "http://127.0.0.1:8002", "k", 8002, http_url="http://127.0.0.1:8000"
        )
    )
    with pytest.raises(NotRunningError) as raised:
        ApiClient("127.0.0.1", 1, None).models()
    start, _, running = str(raised.value).partition("; running: ")
    assert start.startswith("no server answers at 127.0.0.1:1; start one with: ")
    assert running == f"blue (HTTP 8000, admin 8002, process {me.pid})"


def test_status_and_profile_use_the_stored_key(server: FakeServer) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    url = f"http://127.0.0.1:{server.port}"
    state.save(state.ServeState(me.pid, me.started, "headrace", url, "stored-key", server.port))
    done = _run("status", "--json", "--admin-port", str(server.port))
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document == STATUS
    assert server.requests[-1][1]["Authorization"] == "Bearer stored-key"
    heads, row, ranks, *notes = _run("status", "--admin-port", str(server.port), COLUMNS="80").stdout.splitlines()
    assert heads.split()[:4] == ["replica", "model", "role", "tp×pp"]
    assert row.split() == ["tiny-0", "tiny", "decode", "4×2", "ready", "3", "0", "12.5%"]
    assert ranks.startswith("tiny-0: rank 0 cuda:0 on 10.0.0.1 (process 4000), rank 1 ") and ranks.count("process") == 8
    assert notes == [
        "tiny-0: a note",
        "tiny-0: beside it generation 1, draining",
        "tiny-0: it was not rolled: a bad file",
        "controller: a problem",
    ]
    profiled = _run("profile", "tiny-0", "--steps", "5", "--admin-port", str(server.port))
    assert profiled.returncode == 0, profiled.stderr
    path, headers, body = server.requests[-1]
    assert (path, headers["Authorization"], json.loads(body)) == (
        "/profile",
        "Bearer stored-key",
        {"replica": "tiny-0", "steps": 5},
    )
    lines = [line.split() for line in profiled.stdout.splitlines()]
    assert ["rank", "0", "on", "10.0.0.1:", "5", "steps", "in", "0.500", "s", "/p/[x]-r0.gz"] in lines
    assert ["aten::mm", "7", "12.35", "81.5%"] in lines
    assert "5 of 40 steps" in profiled.stdout and "no step ran" in profiled.stdout
    server.broken = True
    refused = _run("profile", "--admin-port", str(server.port))
    assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", "headrace: the prompt is too long\n")
    elsewhere = _run("status", "--admin-port", "1")
    assert elsewhere.returncode == 1 and f"admin {server.port}" in elsewhere.stderr
