"""The clients of examples/ against a router with keys; test_documentation.py runs them against a real server."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "key-for-examples"


@pytest.mark.parametrize(("example", "variable"), [("openai", "OPENAI_API_KEY"), ("grpc", "HEADRACE_API_KEY")])
def test_a_client_sends_the_key_of_its_variable(
    harness: Any, make_replica: Callable[..., Any], expected_reply: str, example: str, variable: str
) -> None:
    harness.start([make_replica(model="smollm2")], auth={"keys": [KEY]})
    environ = {name: value for name, value in os.environ.items() if name != variable}
    environ |= {"OPENAI_BASE_URL": f"{harness.url}/v1", "GRPC_ADDRESS": f"127.0.0.1:{harness.router.grpc_port}"}

    def run(**more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(EXAMPLES / f"{example}_client.py"), "Hello"]
        return subprocess.run(command, env=environ | more, capture_output=True, text=True, timeout=60, check=False)

    assert expected_reply in run(**{variable: KEY}).stdout
    assert run().returncode != 0, "without a key it is refused"
