"""`headrace launch` where no server runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.e2e.headrace_process import environment

pytestmark = pytest.mark.faults("serve")


KEY = "the-key-of-a-user"
OTHERS = {"HEADRACE_LOG_FORMAT": "json", "HEADRACE_API_KEYS": KEY, "HEADRACE_API_KEY": KEY}


@pytest.mark.parametrize("variables", [{}, OTHERS])
def test_launch_starts_a_server_for_the_agent_and_stops_it(tmp_path: Path, variables: dict[str, str]) -> None:
    """Also with keys, and with messages for programs."""
    agent = tmp_path / "codex"
    agent.write_text('#!/bin/sh\necho "the agent has $*"\n')
    agent.chmod(0o755)
    ports = {f"HEADRACE_{name}": "0" for name in ("PORT", "GRPC_PORT", "ADMIN_PORT")}
    small = {"HEADRACE_MAX_MODEL_LEN": "2048", "HEADRACE_KV_CACHE_MEMORY": "128MiB"}
    env = environment(tmp_path / "home") | ports | small | variables
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    command = [sys.executable, "-m", "headrace_cluster", "launch", "codex", "--", "exec"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('the agent has -c model="smollm2"') and done.stdout.rstrip().endswith(" exec")
    assert "one is started" in done.stderr and "--max-model-len 65536" in done.stderr
    assert not list((tmp_path / "home").glob("serve-*.json")), "it was stopped"
