"""Failed starts: one sentence, exit 1 (2 for a wrong command line), no process and no file remain."""

import re
import socket
import time
from collections.abc import Callable

import pytest

from support.e2e.headrace_process import Serve


def _sentence(serve: Serve, within: float, status: int = 1) -> str:
    """The error of a serve, known before Ray is started; it must fail with one sentence and leave nothing."""
    _await_end(serve, within)
    lines = serve.stderr_text.splitlines()
    assert serve.process.returncode == status
    assert all(re.match(r"headrace: |\d\d:\d\d:\d\d serve {6}", line) for line in lines), serve.stderr_text
    sentences = [line for line in lines if re.match(r"headrace: |\S+ serve +error: ", line)]
    assert len(sentences) == 1, serve.stderr_text
    assert "] Ray:" not in serve.stderr_text
    return sentences[0]


def _await_end(serve: Serve, within: float) -> None:
    began = time.monotonic()
    while serve.process.poll() is None:
        serve.record_processes()
        time.sleep(0.1)
        assert time.monotonic() - began < within, f"still running:\n{serve.stderr_text}"
    assert "Traceback" not in serve.stderr_text and serve.stdout_text == ""
    deadline = time.monotonic() + 5
    while remaining := serve.remaining():
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)
    assert not list(serve.home.glob("*-*")), "no key outlives it"


def test_a_port_in_use(start: Callable[..., Serve]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ("--port", port, "--grpc-port", "0", "--admin-port", "0")
        sentence = _sentence(start(*flags, ports=False), within=10)
    assert port in sentence and "--port" in sentence and "in use" in sentence


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--replicas", "41"), 1, ("41 ranks", "CPUs")),
        (("--tp", "2", "--device", "cuda"), 1, ("2 GPUs are needed", "--tp")),
        (("/nowhere/model",), 1, ("/nowhere/model", "check the path")),
        (("--host", "0.0.0.0"), 1, ("0.0.0.0", "--allow-no-auth")),
        (("--kv-cache-memory", "lots"), 2, ("lots", "2GiB")),
        (("-f", "/nowhere.yaml"), 2, ("/nowhere.yaml",)),
    ],
)
def test_errors_that_are_found_before_a_start(
    start: Callable[..., Serve], flags: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    sentence = _sentence(start(*flags), within=10, status=status)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-memory", "1MiB"), ("larger --kv-cache-memory",)),
        (("--tp", "4"), ("tp 4", "KV heads", "--tp 1, 2, 3 or 9")),
    ],
)
def test_what_a_rank_refuses_ends_the_start_with_its_sentence(
    start: Callable[..., Serve], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    serve = start(*flags)
    _await_end(serve, within=180)
    sentence = serve.stderr_text.splitlines()[-1]
    assert serve.process.returncode == 1 and " error: " in sentence
    assert all(word in sentence for word in words), sentence
