"""`headrace launch`: what the agent gets in its arguments and its environment, against a server of canned answers."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from headrace_cluster.cli.agents import AgentName, Target, command_of, variables_of
from support.e2e.headrace_process import eventually

TARGET = Target("http://127.0.0.1:9000", 'Qwen/"3"', "a-key", 40_000)
SHOWS_ITSELF = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(7)
"""


class _Server(ThreadingHTTPServer):
    """context: of its model. asked: paths and bodies of the requests for answers, and the key of the last one."""

    context = 40_000
    refuses = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, Any, str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        entry = {"id": "m", "max_model_len": self.server.context}
        if self.path == "/v1/models":
            self._send(200, {"data": [entry]})
        elif self.path in ("/v1/models/m", "/v1/models/claude-x"):
            self._send(200, {**entry, "id": self.path.rpartition("/")[2]})
        else:
            self._send(404, {"error": {"message": "There is no such model."}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body, self.headers["authorization"]))
        if self.server.refuses:
            self._send(503, {"error": {"message": self.server.refuses}})
        else:
            self._send(200, {})

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[_Server]:
    made = _Server()
    Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def _command(
    server: _Server, folder: Path, *arguments: str, agent: str = "codex", program: str = SHOWS_ITSELF
) -> tuple[list[str], dict[str, str]]:
    """The command line and its environment. program: of the agents that are installed."""
    for name in ("codex", "claude"):
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
    env = kept | {
        "PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "HEADRACE_HOME": str(folder / "home"),
    }
    address = ("--host", "127.0.0.1", "--port", str(server.server_port))
    return [sys.executable, "-m", "headrace_cluster", "launch", agent, *address, *arguments], env


def _launch(server: _Server, folder: Path, *arguments: str, **options: str) -> "subprocess.CompletedProcess[str]":
    command, env = _command(server, folder, *arguments, **options)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


def test_the_settings_of_each_agent() -> None:
    command = command_of(AgentName.CODEX, TARGET, ["exec", "Fix it"])
    settings = tomllib.loads("\n".join(command[2:-2:2]))
    assert command[0] == "codex" and command[1:-2:2] == ["-c"] * 4 and command[-2:] == ["exec", "Fix it"]
    assert settings["model"] == TARGET.model and settings["model_context_window"] == 40_000
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:9000/v1" and provider["wire_api"] == "responses"
    assert variables_of(AgentName.CODEX, TARGET) == {provider["env_key"]: "a-key"}

    assert command_of(AgentName.OPENCODE, TARGET, ["run"]) == ["opencode", "run"]
    config = json.loads(variables_of(AgentName.OPENCODE, TARGET)["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == f"headrace/{TARGET.model}"
    assert config["provider"]["headrace"]["models"][TARGET.model]["limit"] == {"context": 40_000, "output": 8192}

    variables = variables_of(AgentName.CLAUDE, TARGET)
    assert {name for name, value in variables.items() if value == TARGET.model} >= {
        "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"
    }  # fmt: skip
    assert variables["ANTHROPIC_BASE_URL"] == TARGET.url and variables["ANTHROPIC_AUTH_TOKEN"] == "a-key"


def test_the_recipes_by_hand_say_the_same() -> None:
    """Those of docs/agents.md."""
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    blocks = dict(re.findall(r"^```(toml|json)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    target = Target("http://127.0.0.1:8000", "smollm2", "none", 65_536)
    assert tomllib.loads(blocks["toml"]) == tomllib.loads("\n".join(command_of(AgentName.CODEX, target, [])[2::2]))
    config = json.loads(blocks["json"])
    launched = json.loads(variables_of(AgentName.OPENCODE, target)["OPENCODE_CONFIG_CONTENT"])
    by_hand, ours = config["provider"]["headrace"], launched["provider"]["headrace"]
    assert (
        config["model"] == launched["model"] and by_hand["options"] == ours["options"] and by_hand["npm"] == ours["npm"]
    )
    variables = variables_of(AgentName.CLAUDE, target)
    named = dict(re.findall(r"\b((?:ANTHROPIC|CLAUDE)_\w+)=(\S+)", page))
    assert len(named) == 6 and named.items() <= variables.items()


def test_the_agent_runs_with_its_own_arguments_and_exit_code(server: _Server, tmp_path: Path) -> None:
    done = _launch(server, tmp_path, "--api-key", "k", "--", "exec", "--", "-x")
    arguments, environment = json.loads(done.stdout)
    assert done.returncode == 7 and arguments[-3:] == ["exec", "--", "-x"], done.stderr
    assert environment["HEADRACE_API_KEY"] == "k" and "ANTHROPIC_MODEL" not in environment
    ((path, body, key),) = server.asked
    assert (path, body["model"], body["max_output_tokens"], key) == ("/v1/responses", "m", 1, "Bearer k")
    done = _launch(server, tmp_path, "claude-x", agent="claude")
    arguments, environment = json.loads(done.stdout)
    assert arguments == [] and environment["ANTHROPIC_MODEL"] == "claude-x" == server.asked[-1][1]["model"]
    assert server.asked[-1][0] == "/v1/messages" and "warning" not in done.stderr and "context" not in done.stderr


def test_what_is_wrong_is_said_before_the_agent_starts(server: _Server, tmp_path: Path) -> None:
    server.context = 8192
    assert "--max-model-len 65536" in _launch(server, tmp_path).stderr
    unknown = _launch(server, tmp_path, "other")
    assert unknown.returncode == 1 and "There is no such model." in unknown.stderr and not unknown.stdout
    missing = _launch(server, tmp_path, agent="opencode")
    assert missing.returncode == 1 and "npm install -g opencode-ai" in missing.stderr
    server.refuses = "No replica of 'm' is ready; try again in a moment."
    refused = _launch(server, tmp_path)
    assert refused.returncode == 1 and server.refuses in refused.stderr and not refused.stdout
    wrong = _launch(server, tmp_path, agent="emacs")
    assert wrong.returncode == 2 and "codex" in wrong.stderr
    server.refuses = ""
    broken = _launch(server, tmp_path, program="no program")
    assert broken.returncode == 1 and "codex cannot be run" in broken.stderr


@pytest.mark.faults("tools")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_agent_too(server: _Server, tmp_path: Path, number: signal.Signals) -> None:
    """As when the terminal is closed; a server that was started for it is stopped in the same way."""
    command, env = _command(server, tmp_path, program="#!/bin/sh\necho $$\nexec sleep 60\n")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        agent = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    eventually(lambda: not psutil.pid_exists(agent) or psutil.Process(agent).status() == psutil.STATUS_ZOMBIE, 30)
