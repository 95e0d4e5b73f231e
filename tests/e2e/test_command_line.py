"""The client commands with a running server: their output, streams and exit status."""

import json
import re
from pathlib import Path
from typing import Any

from support.e2e.headrace_process import Serve, headrace


def test_the_banner_lists_every_address(server: Serve) -> None:
    stderr_text = server.stderr_text
    for path in ("/v1", "/docs", "/health", "/metrics"):
        assert f"{server.url}{path}" in stderr_text
    for pattern in (
        r"gRPC +127\.0\.0\.1:\d+",
        r"admin +http://127\.0\.0\.1:\d+",
        r"Ray +http://\S+ +\(token: cat \S+\)",
    ):
        assert re.search(pattern, stderr_text), pattern
    assert re.search(
        r"defaults +max_tokens 512, temperature 0, .*\(a request's own values override them\)", stderr_text
    )
    assert re.search(r"smollm2-0 +cpu, float32, \d+ threads?, KV cache [\d,]+ tokens, context 2,048\n", stderr_text)
    assert stderr_text.count("smollm2-0 ") == 1, "internals are shown with --verbose"
    logs = re.search(r"logs +(\S+)  \(\./headrace logs\)", stderr_text)
    assert logs and Path(logs[1], "smollm2-0-rank0.log").is_file()
    token = re.search(r"token: cat (\S+?)\)", stderr_text)
    assert token and Path(token[1]).stat().st_mode & 0o777 == 0o600
    assert server.stdout_text == "", "stdout is for data"
    assert "Traceback" not in stderr_text


def test_status_as_json(server: Serve) -> None:
    done = server.run("status", "--json", "--admin-port", str(server.admin_port))
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    (replica,) = document["replicas"]
    assert {"id", "model", "revision", "role", "state", "load", "ranks"} <= replica.keys()
    assert (replica["id"], replica["model"], replica["role"], replica["state"]) == (
        "smollm2-0",
        "smollm2",
        "both",
        "ready",
    )
    assert replica["revision"]
    assert set(replica["load"]) == {"running", "waiting", "kv_usage"}
    (rank,) = replica["ranks"]
    assert set(rank) == {"rank", "pid", "node", "device"} and (rank["rank"], rank["device"]) == (0, "cpu")
    (router,) = document["routers"]
    assert {"id", "pid", "http", "grpc"} <= router.keys()
    assert server.url.endswith(router["http"]) and router["grpc"] == server.grpc
    server.record_processes()
    assert {rank["pid"], router["pid"]} <= server.processes.keys()


def test_status_as_a_table(server: Serve) -> None:
    done = server.run("status", "--admin-port", str(server.admin_port))
    assert done.returncode == 0 and "smollm2-0" in done.stdout and "ready" in done.stdout
    assert "smollm2: placed by predicted, " in done.stdout and "are not known" not in done.stdout


def test_chat_once(server: Serve) -> None:
    port = server.url.rpartition(":")[2]
    question = "What is the capital of France? Answer in one sentence."
    done = server.run("chat", "--once", question, "--port", port, "--temperature", "0", "--max-tokens", "24")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout and done.stdout.endswith("\n")
    refused = server.run("chat", "--once", "x", "--port", port, "--model", "gpt-9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "gpt-9" in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_without_a_server_a_sentence_names_the_start_command(tmp_path: Path) -> None:
    for command in (
        ["chat", "--once", "x", "--port", "1"],
        ["status", "--admin-port", "1"],
        ["stop", "--admin-port", "1"],
    ):
        done = headrace(tmp_path / "home", *command)
        assert (done.returncode, done.stdout) == (1, ""), command
        assert "headrace serve" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_admin_port_needs_its_key(server: Serve, tmp_path: Path) -> None:
    import httpx

    url = f"http://127.0.0.1:{server.admin_port}"
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for method, path in (("GET", "/status"), ("POST", "/stop")):
            assert httpx.request(method, url + path, headers=headers, trust_env=False).status_code == 401
    key = json.loads((server.home / f"serve-{server.process.pid}.json").read_text())["admin_key"]
    good = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{url}/status", headers=good, trust_env=False).status_code == 200
    rebound = httpx.get(f"{url}/status", headers=good | {"host": "evil.example"}, trust_env=False)
    assert rebound.status_code in (400, 403, 421), "DNS rebinding"
    assert server.process.poll() is None
    without_key = headrace(tmp_path / "home", "status", "--admin-port", str(server.admin_port))
    assert without_key.returncode == 1


def test_all_sockets_are_on_loopback_only(server: Serve) -> None:
    """Ray's included: those of its metrics need no token."""
    listening = server.listening()
    assert [socket for socket in listening if socket.address not in ("127.0.0.1", "::1")] == []
    ports = {int(address.rpartition(":")[2]) for address in (server.url, server.grpc)} | {server.admin_port}
    assert ports < {socket.port for socket in listening}
    processes = " ".join(socket.process for socket in listening)
    assert all(name in processes for name in ("gcs_server", "raylet", "ray::RankActor", "headrace_cluster controller"))
