"""Codex and Claude Code, unmodified: each finishes a loop of two steps with a model that answers by a script."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.e2e.foreign import CLAUDE, CODEX, foreign_python
from support.router.fake_replica import TOOL_TEMPLATE

pytestmark = [pytest.mark.faults("tools"), pytest.mark.timeout(1200)]

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
CODEX_PATH = "from codex_cli_bin import bundled_codex_path; print(bundled_codex_path())"
CLAUDE_RUN = """
import asyncio, sys
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query
async def main():
    options = ClaudeAgentOptions(model="tiny", permission_mode="bypassPermissions", cwd=sys.argv[1])
    async for message in query(prompt="Run the tool.", options=options):
        if isinstance(message, ResultMessage):
            print(message.result)
asyncio.run(main())
"""


def _start(harness: Any, make_replica: Any, call: str) -> Any:
    replica = make_replica(chat_template=TOOL_TEMPLATE, max_model_len=400_000, replies=(call,), reply="All done.")
    harness.start([replica])
    return replica


def _run(command: Sequence[str], folder: Path, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE", "OPENAI"))}
    done = subprocess.run(
        command,
        env=kept | {"HOME": str(folder), "NO_PROXY": "127.0.0.1"} | env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _check_second_turn(replica: Any) -> None:
    """It extends the first: at least 95 % of its prompt are tokens that the cache has."""
    first, second = [list(submit.prompt_token_ids) for submit in replica.submits[-2:]]
    same = next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )
    assert same >= 0.95 * len(second)
    assert "hello" in replica.tokenizer.decode(second[same:])


def test_codex(harness: Any, make_replica: Any, tmp_path: Path) -> None:
    python = foreign_python(CODEX)
    codex = subprocess.run([str(python), "-c", CODEX_PATH], capture_output=True, text=True, check=True).stdout.strip()
    replica = _start(harness, make_replica, CALL % ("exec_command", '{"cmd": "echo hel\'\'lo"}'))
    provider = f'{{name="h",base_url="{harness.url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    settings = ("-c", 'model_provider="h"', "-c", f"model_providers.h={provider}", "-c", 'model="tiny"')
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    command = [codex, "exec", *settings, *flags, "Run the tool."]
    assert _run(command, tmp_path, CODEX_HOME=str(tmp_path), OPENAI_API_KEY="none").strip() == "All done."
    _check_second_turn(replica)


def test_claude_code(harness: Any, make_replica: Any, tmp_path: Path) -> None:
    python = foreign_python(CLAUDE)
    arguments = '{"command": "echo hel\'\'lo", "description": "Greets."}'
    replica = _start(harness, make_replica, CALL % ("Bash", arguments))
    env = {
        "ANTHROPIC_BASE_URL": harness.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",  # it refuses to run as root otherwise
    }
    assert _run([str(python), "-c", CLAUDE_RUN, str(tmp_path)], tmp_path, **env).strip() == "All done."
    _check_second_turn(replica)
