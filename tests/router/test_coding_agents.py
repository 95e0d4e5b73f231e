"""Codex, Claude Code and opencode, unmodified, run by `headrace launch`: each finishes a loop with a tool.

The model answers by a script.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.e2e.foreign import CLAUDE, CODEX, OPENCODE, foreign_npm, foreign_python
from support.router.fake_replica import TOOL_TEMPLATE

pytestmark = [pytest.mark.faults("tools"), pytest.mark.timeout(1200)]

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
GREETS = '{"command": "echo hel\'\'lo", "description": "Greets."}'


def _start(harness: Any, make_replica: Any, *replies: str) -> Any:
    """replies: after that to the call by which `launch` tries the model; then the model is done."""
    options = {"chat_template": TOOL_TEMPLATE, "max_model_len": 400_000}
    replica = make_replica(replies=("hm", *replies), reply="All done.", **options)
    harness.start([replica])
    return replica


def _launch(harness: Any, agent: str, program: Path, folder: Path, arguments: Sequence[str], **env: str) -> str:
    """What it prints. program: the agent, which is in PATH under its name then."""
    (folder / "bin").mkdir()
    (folder / "bin" / agent).symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE", "OPENAI"))}
    kept["PATH"] = f"{folder / 'bin'}:{kept['PATH']}"
    address = ("--host", "127.0.0.1", "--port", harness.url.rpartition(":")[2])
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cluster", "launch", agent, "tiny", *address, "--", *arguments],
        env=kept | {"HOME": str(folder), "NO_PROXY": "127.0.0.1"} | env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"headrace: {agent} uses tiny of {harness.url}" in done.stderr
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
    code = "from codex_cli_bin import bundled_codex_path; print(bundled_codex_path())"
    found = subprocess.run([str(foreign_python(CODEX)), "-c", code], capture_output=True, text=True, check=True)
    replica = _start(harness, make_replica, CALL % ("exec_command", '{"cmd": "echo hel\'\'lo"}'))
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    program = Path(found.stdout.strip())
    answer = _launch(harness, "codex", program, tmp_path, ("exec", *flags, "Run the tool."), CODEX_HOME=str(tmp_path))
    assert answer.strip() == "All done."
    assert not (tmp_path / "config.toml").exists(), "its settings are in its arguments"
    _check_second_turn(replica)


def test_claude_code(harness: Any, make_replica: Any, tmp_path: Path) -> None:
    python = foreign_python(CLAUDE)
    (program,) = python.parent.parent.glob("lib/python*/site-packages/claude_agent_sdk/_bundled/claude")
    replica = _start(harness, make_replica, CALL % ("Bash", GREETS))
    flags = ("-p", "Run the tool.", "--dangerously-skip-permissions")
    # IS_SANDBOX: it refuses to run as root otherwise.
    answer = _launch(harness, "claude", program, tmp_path, flags, IS_SANDBOX="1")
    assert answer.strip() == "All done."
    _check_second_turn(replica)


def test_opencode(harness: Any, make_replica: Any, tmp_path: Path) -> None:
    """Its second request asks for a title."""
    program = foreign_npm(OPENCODE) / "bin" / "opencode"
    replica = _start(harness, make_replica, "A title", CALL % ("bash", GREETS))
    assert _launch(harness, "opencode", program, tmp_path, ("run", "Run the tool.")).strip() == "All done."
    _check_second_turn(replica)
