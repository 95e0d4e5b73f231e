"""The command line as a process: exit status, streams, and how little the client commands load."""

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

from headrace_cluster import state
from headrace_cluster.processes import ProcessId

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
    [
        ("--help",),
        ("version",),
        ("status", "--json"),
        ("status",),
        ("stop",),
        ("profile",),
        ("role", "m-0", "both"),
        ("drain", "m-0"),
        ("undrain", "m-0"),
        ("chat", "--once", "x"),
        ("config", "show"),
    ],
)
def test_client_commands_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    modules = _imported(*arguments)
    assert "typer" in modules
    heavy = {name for name in modules if name.split(".")[0] in HEAVY or name in HEAVY}
    assert heavy == set()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--no-such-flag",), 2, "No such option"),
        (("serve", "--replicas", "many"), 2, "valid integer"),
        (("serve", "--replicas", "0"), 2, "models[0].replicas"),
        (("serve", "--dtype", "int3"), 2, "models[0].dtype"),
        (("serve", "--kv-cache-memory", "lots"), 2, "2GiB"),
        (("serve", "-f", "/nowhere.yaml"), 2, "cannot be read"),
        (("serve", "/no/such/model"), 1, "no model at"),
        (("serve", "--host", "0.0.0.0"), 1, "--allow-no-auth"),
        (("router",), 2, "--controller"),
        (("router", "--controller", "127.0.0.1:1"), 2, "--secret-file"),
        (("router", "--config-stdin"), 2, "--secret-file"),
        (("status",), 1, "./headrace serve"),
        (("stop",), 1, "./headrace serve"),
        (("profile",), 1, "./headrace serve"),
        (("profile", "--steps", "many"), 2, "valid integer"),
        (("role", "m-0", "both"), 1, "./headrace serve"),
        (("role", "m-0"), 2, "Missing argument"),
        (("drain", "m-0"), 1, "./headrace serve"),
        (("drain", "m-0", "--seconds", "-1"), 2, "greater than or equal to 0"),
        (("undrain", "m-0"), 1, "./headrace serve"),
        (("serve", "--prefill", "1"), 2, "without decode"),
        (("serve", "--prefill", "1", "--decode", "1", "--replicas", "2"), 2, "beside prefill and decode"),
        (("chat", "--once", "x", "--port", "1"), 1, "./headrace serve --port 1"),
    ],
)
def test_failures_are_one_sentence_on_stderr(arguments: tuple[str, ...], status: int, words: str) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_sentence(server: "FakeServer") -> None:
    done = _run("serve", "--grpc-port", str(server.port))
    assert done.returncode == 1
    assert f"port {server.port} on 127.0.0.1 is in use; choose another with --grpc-port" in done.stderr


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


def test_a_strange_variable_is_a_warning() -> None:
    done = _run("config", "show", HEADRACE_PROT="1")
    assert done.returncode == 0
    assert "HEADRACE_PROT sets nothing (did you mean HEADRACE_PORT?)" in done.stderr


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
        }
    ],
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
    """Answers like a router and an admin API; keeps what it was asked."""

    def __init__(self) -> None:
        outer = self
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.broken = False

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.take(self)

            def do_POST(self) -> None:
                outer.take(self)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.requests.append((handler.path, dict(handler.headers), body))
        if handler.path == "/v1/models":
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
        "max_completion_tokens": 5,
        "stream": True,
    }


def test_chat_keeps_the_conversation(server: FakeServer) -> None:
    done = _run("chat", "--model", "m", stdin="eins\nzwei\n/clear\ndrei\n", HEADRACE_PORT=str(server.port))
    assert (done.returncode, done.stdout) == (0, "Grüß Gott\n" * 3)
    asked = [[m["content"] for m in json.loads(body)["messages"]] for _, _, body in server.requests]
    assert asked == [["eins"], ["eins", "Grüß Gott", "zwei"], ["drei"]]


def test_chat_repeats_the_servers_sentence(server: FakeServer) -> None:
    server.broken = True
    done = _run("chat", "--once", "x", "--port", str(server.port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "headrace: the prompt is too long\n"


def test_status_and_profile_use_the_kept_key(server: FakeServer) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    url = f"http://127.0.0.1:{server.port}"
    state.save(state.ServeState(me.pid, me.started, "headrace", url, "kept-key", server.port))
    done = _run("status", "--json", "--admin-port", str(server.port))
    assert done.returncode == 0
    assert json.loads(done.stdout) == STATUS
    assert server.requests[-1][1]["Authorization"] == "Bearer kept-key"
    heads, row, ranks = _run("status", "--admin-port", str(server.port), COLUMNS="80").stdout.splitlines()
    assert heads.split()[:4] == ["replica", "model", "role", "tp×pp"]
    assert row.split() == ["tiny-0", "tiny", "decode", "4×2", "ready", "3", "0", "12.5%"]
    assert ranks.startswith("tiny-0: rank 0 cuda:0 on 10.0.0.1 (process 4000), rank 1 ") and ranks.count("process") == 8
    profiled = _run("profile", "tiny-0", "--steps", "5", "--admin-port", str(server.port))
    assert profiled.returncode == 0, profiled.stderr
    path, headers, body = server.requests[-1]
    assert (path, headers["Authorization"], json.loads(body)) == (
        "/profile",
        "Bearer kept-key",
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
    assert f"servers run with --admin-port {server.port}" in elsewhere.stderr
