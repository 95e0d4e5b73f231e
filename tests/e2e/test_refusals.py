"""Failed starts: one sentence, exit 1 (2 for a wrong command line), no process and no file remain."""

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.e2e.headrace_process import Serve

FREE = ("--port", "0", "--grpc-port", "0", "--admin-port", "0")


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


@pytest.mark.parametrize("flag", ["--port", "--grpc-port", "--admin-port"])
def test_a_port_in_use(start: Callable[..., Serve], flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        others = [part for pair in zip(FREE[::2], FREE[1::2], strict=True) if pair[0] != flag for part in pair]
        sentence = _sentence(start(*others, flag, port, ports=False), within=10)
    assert port in sentence and flag in sentence and "in use" in sentence


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("--replicas", "41"), 1, ("41 ranks", "CPUs")),
        (("--tp", "2", "--device", "cuda"), 1, ("2 GPUs are needed", "--tp")),
        (("/nowhere/model",), 1, ("/nowhere/model", "check the path")),
        (("./no-such.gguf",), 1, ("no-such.gguf", "check the path")),
        (("--host", "0.0.0.0"), 1, ("0.0.0.0", "--allow-no-auth")),
        (("--kv-cache-memory", "lots"), 2, ("lots", "2GiB")),
        (("--dtype", "float64"), 2, ("dtype", "float32")),
        (("--replicas", "-1"), 2, ("replicas",)),
        (("-f", "/nowhere.yaml"), 2, ("/nowhere.yaml",)),
    ],
)
def test_errors_that_are_found_before_a_start(
    start: Callable[..., Serve], flags: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    sentence = _sentence(start(*flags), within=10, status=status)
    assert all(word in sentence for word in words), sentence


def test_an_unknown_key_in_a_file(start: Callable[..., Serve], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("models: [{source: smollm2, replicsa: 2}]\n")
    assert "replicsa" in _sentence(start("-f", str(path)), within=10, status=2)


def test_an_invalid_model_file(start: Callable[..., Serve], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 200)
    sentence = _sentence(start(str(path)), within=20)
    assert "gguf" in sentence.lower()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-memory", "1MiB"), ("larger --kv-cache-memory",)),
        (("--tp", "4"), ("tp 4", "KV heads", "--tp 1, 2, 3 or 9")),
        (("--tp", "2", "--ep"), ("no routed experts", "without --ep")),
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ep",), ("ep", "tp is 1")),
        (("--tp", "0"), ("tp", "at least 1")),
    ],
)
def test_flags_of_a_split(start: Callable[..., Serve], flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    sentence = _sentence(start(*flags), within=15, status=2)
    assert all(word in sentence for word in words), sentence
