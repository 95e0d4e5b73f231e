"""Every command of README.md and docs/, from the root of the checkout.

Those of clients run against the shared server, on its ports; the others verbatim, on the default ports.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.settings import read_file
from support.e2e.doc_blocks import KINDS, ROOT, Block, blocks
from support.e2e.headrace_process import START_SECONDS, Serve, environment, eventually

PORTS = (8000, 8001, 8002)
BLOCK_SECONDS = 300
BLOCKS = blocks()


def _of_kind(*kinds: str) -> list[object]:
    chosen = [block for block in BLOCKS if block.kind in kinds]
    assert chosen, f"there is no block of kind {kinds}: remove its test"
    return [pytest.param(block, id=block.name) for block in chosen]


class DefaultServer:
    """One server, started as in the documentation; `run` executes further commands while it runs."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._log = home.with_suffix(".log")

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Starts `command` in the background; the block inside begins when the banner is shown."""
        for port in PORTS:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    pytest.fail(f"the documentation uses port {port}: stop its listener and run this again")
        with self._log.open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=ROOT,
                env=_environment(self._home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            eventually(lambda: self._ready or process.poll() is not None, 2 * START_SECONDS, "the banner")
            assert process.poll() is None, self._log.read_text()
            yield
            if process.poll() is None:
                assert self.run("./headrace stop").returncode == 0
            assert process.wait(30) == 0, self._log.read_text()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    @property
    def _ready(self) -> bool:
        return "is ready after" in self._log.read_text() or "are ready after" in self._log.read_text()

    def run(self, command: str, language: str = "sh") -> "subprocess.CompletedProcess[str]":
        return _run(command, language, self._home)


def _environment(home: Path) -> dict[str, str]:
    return environment(home) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _run(
    command: str, language: str, home: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    """Runs one command, or a whole block, to its end."""
    interpreter = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
    return subprocess.run(
        [*interpreter, command],
        cwd=ROOT,
        env={**_environment(home), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BLOCK_SECONDS,
        check=False,
    )


def test_every_block_has_a_mark() -> None:
    assert BLOCKS
    unmarked = [block.name for block in BLOCKS if block.kind not in KINDS]
    assert not unmarked, (
        f"these blocks need a mark that states how they are tested (tests/support/e2e/doc_blocks.py): {unmarked}"
    )
    assert not [block.name for block in BLOCKS if block.kind == "no" and not block.why]


@pytest.mark.parametrize("block", _of_kind("client"))
def test_client_block(block: Block, server: Serve) -> None:
    text = block.text.replace("http://127.0.0.1:8000", server.url)
    addresses = {"OPENAI_BASE_URL": f"{server.url}/v1", "GRPC_ADDRESS": server.grpc}
    _check(block, _run(text, block.language, server.home, addresses))


@pytest.mark.parametrize("block", _of_kind("plain"))
def test_plain_block(block: Block, tmp_path: Path) -> None:
    _check(block, _run(block.text, block.language, tmp_path / "home"))


@pytest.mark.parametrize("block", _of_kind("spec"))
def test_cluster_file(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(block.text)
    parse_spec(read_file(path))


@pytest.mark.faults("serve")
@pytest.mark.parametrize("block", _of_kind("session"))
def test_session_block(block: Block, tmp_path: Path) -> None:
    first, *rest = block.commands
    server = DefaultServer(tmp_path / "home")
    with server.serving(first):
        for command in rest:
            done = server.run(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}"


_STARTS = [
    pytest.param(command, id=command.partition("#")[0].strip())
    for block in BLOCKS
    if block.kind == "starts"
    for command in block.commands
]


@pytest.mark.faults("serve")
@pytest.mark.parametrize("command", _STARTS)
def test_start_command(command: str, tmp_path: Path) -> None:
    port = re.search(r"--port (\d+)", command)
    server = DefaultServer(tmp_path / "home")
    with server.serving(command.partition("#")[0].strip()):
        assert "Paris" in _ask(int(port[1]) if port else 8000)


def _ask(port: int) -> str:
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(question | {"model": model}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def _check(block: Block, done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, done.stdout
    assert re.search(block.expect, done.stdout, re.DOTALL), f"{block.expect!r} is not in:\n{done.stdout}"
