"""What the worst accepted input of each limit costs a router: lag of its event loop, and memory.

    PYTHONPATH=tests python benchmarks/limits.py [--cases trailers,echo] [--rounds 5] [--save]

A router in a process of its own, and a replica without a model in this one (tests/support). A probe on the router's
event loop sleeps 1 ms at a time. `lag` is the longest delay of the probe while the input is handled, in ms; `cpu` is
the most processor time, in ms, that the whole process used between two wake-ups of the probe: a bound of the lag on a
machine without other load. Both are the best of all rounds, since other load only adds to them. `MiB` is the growth of
the process's largest resident size, the worst of all rounds. `idle` is the same without input. docs/limits.md has the
table.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import machine

from headrace_base.logs import LogConfig, configure_logs
from headrace_proto.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateOptions,
    GenerateRequest,
    TokenIds,
)
from headrace_router.access.tls_config import TlsConfig
from headrace_router.api.http.protocol import HEADER_BYTES, PIPELINED_REQUESTS
from headrace_router.config import RouterConfig, StaticMember
from headrace_router.core.limits import Limits
from headrace_router.event_loop import exempt_from_collection, new_event_loop
from headrace_router.router_server import RouterServer
from headrace_router.text.text_encoder import CONTROL_SPANS
from support.certificates import Authority
from support.members import secret_file
from support.router import key_updates
from support.router.fake_replica import FakeReplica
from support.router.tokenizer import make_tokenizer

LIMITS = Limits()
CONTEXT = 200_000  # tokens of the model
LOGPROB_TOKENS = LIMITS.logprob_entries // 21
ROUNDS = 5
PROBE_SECONDS = 0.001


class Router:
    """The router's process, as this one sees it."""

    def __init__(self, replica: str, tls: tuple[Path, Path] | None) -> None:
        """tls: files of a certificate and its key."""
        command = [sys.executable, __file__, "--router", replica, *([] if tls is None else ["--tls", *map(str, tls)])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.http, self.grpc = self._read()

    def begin(self) -> None:
        self._write("begin")
        self._read()

    def end(self) -> tuple[float, float, float]:
        """(lag in ms, processor time in ms, memory in MiB) since `begin`."""
        self._write("end")
        lag, cpu, memory = self._read()
        return lag, cpu, memory

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


async def run_router(replica: str, tls: list[Path] | None) -> None:
    """The router's process: answers each line on stdin with one on stdout, until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    configure_logs(LogConfig("router", stderr_level="error"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    members = (StaticMember(address=replica, replica_id="r0"),)
    files = TlsConfig() if tls is None else TlsConfig(cert=tls[0], key=tls[1])
    router = RouterServer(RouterConfig(port=0, grpc_port=0, secret_file=secret_file(), members=members, tls=files))
    await router.start()
    while not router.services.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    exempt_from_collection()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: _forward(loop, lines), daemon=True).start()
    print(json.dumps([router.http_port, router.grpc_port]), flush=True)
    lag = cpu = before = 0.0
    while True:
        began, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(PROBE_SECONDS)
        lag = max(lag, time.perf_counter() - began - PROBE_SECONDS)
        cpu = max(cpu, time.process_time() - used)
        if lines.empty():
            continue
        line = lines.get_nowait()
        if line == "end":
            print(json.dumps([1000 * lag, 1000 * cpu, _memory("VmHWM") - before]), flush=True)
        elif line == "begin":
            before = _reset_memory()
            print("null", flush=True)
        else:
            return
        lag = cpu = 0.0


def _forward(loop: asyncio.AbstractEventLoop, lines: "asyncio.Queue[str]") -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line.strip())
    loop.call_soon_threadsafe(lines.put_nowait, "exit")


def _reset_memory() -> float:
    """Resets the largest resident size to the present one, and returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> float:
    """MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


# The inputs. Each takes the router; what it refuses is refused after the work that is measured.


def _send(router: Router, *parts: bytes) -> bytes:
    """Sends bytes on one connection, and reads until it is closed or silent."""
    received = b""
    with socket.create_connection(("127.0.0.1", router.http), 5) as sock, contextlib.suppress(OSError):
        try:
            for part in parts:
                sock.sendall(part)
        finally:
            sock.settimeout(0.5)
            while piece := sock.recv(1 << 16):
                received += piece
    return received


def _post(router: Router, path: str, body: Any, read_seconds: float = 0.0) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{router.http}/v1/{path}"
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url, content=content, headers=headers) as answer,
    ):
        for _ in answer.iter_raw(1 << 20):
            time.sleep(read_seconds)
    if answer.status_code >= 500:
        print(f"status {answer.status_code}", file=sys.stderr)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", **fields}


def _generate(router: Router, request: GenerateRequest | bytes) -> None:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    options = [("grpc.max_send_message_length", 1 << 30), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{router.grpc}", options) as channel, contextlib.suppress(grpc.RpcError):
        generate: Any = channel.unary_stream("/headrace.v1.Inference/Generate")
        for _ in generate(data):
            pass


def _head(*lines: bytes) -> bytes:
    return b"\r\n".join(
        (b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-type: application/json", *lines, b"", b"")
    )


CHUNKED = _head(b"transfer-encoding: chunked")
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def idle(router: Router) -> None:
    time.sleep(1)


def trailers(router: Router) -> None:
    """header_bytes: a trailer of 100 MiB after a body."""
    _send(router, CHUNKED, b"2\r\n{}\r\n0\r\nx: ", *[b"a" * (1 << 20)] * 100)


def many_trailers(router: Router) -> None:
    """header_bytes: 100 MiB of short trailers."""
    _send(router, CHUNKED, b"2\r\n{}\r\n0\r\n", *[b"a:b\r\n" * 200_000] * 100)


def short_headers(router: Router) -> None:
    """header_bytes: as many headers as fit, twenty times."""
    count = (LIMITS.header_bytes - 100) // (2 + HEADER_BYTES)
    for _ in range(20):
        _send(router, b"GET /health HTTP/1.1\r\nconnection: close\r\n" + b"a:b\r\n" * count + b"\r\n")


def one_byte_chunks(router: Router) -> None:
    """body_bytes: 512 KiB of body in chunks of one byte."""
    _send(router, CHUNKED, *[b"1\r\n \r\n" * 10_000] * 52, b"0\r\n\r\n")


def pipelined_requests(router: Router) -> None:
    """More requests on one connection than it may have waiting."""
    for _ in range(10):
        _send(router, GET * 5000)


def many_connections(router: Router) -> None:
    """connections, connections_per_address: 2500 connections at once from one address."""
    with contextlib.ExitStack() as opened:
        for _ in range(2500):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", router.http))
        time.sleep(2)


def tls_handshakes(router: Router) -> None:
    """connections_per_address: 2000 clients that begin a TLS handshake at once (key: P-256)."""
    hello = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    data = hello.read()
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", router.http), 5)) for _ in range(2000)]
        for one in clients:
            one.sendall(data)
        for one in clients:
            one.recv(1)


def unfinished_heads(router: Router) -> None:
    """header_bytes: 64 clients that send short headers at once, without a request's end."""
    _burst(router, [b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 5200] * 64)


def tls_key_updates(router: Router) -> None:
    """header_seconds: 64 clients that change their TLS key 1,200 times at once."""
    with contextlib.ExitStack() as opened:
        connections = [key_updates.connect(router.http) for _ in range(64)]
        for sock, _ in connections:
            opened.enter_context(sock)
        parts = [key_updates.records(secret, 1200) for _, secret in connections]
        _send_at_once([sock for sock, _ in connections], parts)


def _burst(router: Router, parts: list[bytes]) -> None:
    """Sends each on a connection of its own, all at once."""
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", router.http), 5)) for _ in parts]
        _send_at_once(clients, parts)


def _send_at_once(clients: list[socket.socket], parts: list[bytes]) -> None:
    time.sleep(0.5)
    for client, part in zip(clients, parts, strict=True):
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.send(part)
    time.sleep(2)


# The next ones are of clients that have shown a key: without keys, that is any client with a request.


def keyed_one_byte_chunks(router: Router) -> None:
    """body_bytes: 64 clients with a key that send bodies in chunks of one byte at once."""
    _keyed_burst(router, CHUNKED + b"1\r\n \r\n" * 40_000)


def keyed_pipelined_requests(router: Router) -> None:
    """connections: 64 clients with a key that send as many requests as may wait at once."""
    _keyed_burst(router, GET * PIPELINED_REQUESTS)


def keyed_short_headers(router: Router) -> None:
    """header_bytes: 64 clients with a key that send as many requests at once, each with as many headers as fit."""
    count = (LIMITS.header_bytes - 100) // (2 + HEADER_BYTES)
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * count + b"\r\n"
    _keyed_burst(router, head * PIPELINED_REQUESTS)


def tls_keyed_one_byte_records(router: Router) -> None:
    """body_bytes: 64 clients with a key that send chunks of one byte at once, each byte in a record of its own."""
    text = b"1\r\n \r\n" * 700
    _keyed_tls_burst(router, lambda secret: key_updates.application_data(secret, [GET, CHUNKED, *_bytes(text)]))


def tls_keyed_key_updates(router: Router) -> None:
    """connections: 64 clients with a key that change their TLS key 1,200 times at once."""
    _keyed_tls_burst(router, lambda secret: key_updates.records(secret, 1200, GET))


def _bytes(text: bytes) -> list[bytes]:
    return [text[index : index + 1] for index in range(len(text))]


def _keyed_burst(router: Router, part: bytes) -> None:
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(("127.0.0.1", router.http), 5)) for _ in range(64)]
        for client in clients:
            client.sendall(GET)
            assert client.recv(12) == b"HTTP/1.1 200"
        _send_at_once(clients, [part] * 64)


def _keyed_tls_burst(router: Router, records: Callable[[bytes], bytes]) -> None:
    """records: of a connection with this secret; the first one is a request."""
    with contextlib.ExitStack() as opened:
        parts = []
        for _ in range(64):
            sock, secret = key_updates.connect(router.http)
            opened.enter_context(sock)
            sent = records(secret)
            first = 5 + int.from_bytes(sent[3:5], "big")
            sock.sendall(sent[:first])
            parts.append((sock, sent[first:]))
        time.sleep(1)  # until these are answered
        _send_at_once([sock for sock, _ in parts], [part for _, part in parts])


def token_ids(router: Router) -> None:
    """body_values: a prompt of as many token ids."""
    _post(router, "completions", _completion(prompt=[5] * (LIMITS.body_values - 100), max_tokens=1))


def long_numbers(router: Router) -> None:
    """body_values: as many numbers of 17 digits."""
    numbers = b",".join(b"0.%017d" % index for index in range(LIMITS.body_values - 100))
    _post(router, "completions", b'{"model":"tiny","prompt":[' + numbers + b"]}")


def small_objects(router: Router) -> None:
    """body_values: as many objects with one key."""
    _post(router, "completions", {"model": "tiny", "prompt": [{"a": 1}] * (LIMITS.body_values // 8 - 100)})


def text_of_commas(router: Router) -> None:
    """body_bytes: a text that looks like structure."""
    _post(router, "completions", _completion(prompt="[," * ((LIMITS.body_bytes - 100) // 2)))


def escapes(router: Router) -> None:
    """body_values: as many escapes as are allowed, in one text."""
    _post(router, "completions", b'{"model":"tiny","prompt":"' + b"\\n" * (8 * LIMITS.body_values - 100) + b'"}')


def prompt_chars(router: Router) -> None:
    """prompt_chars, prompt_tokens: a prompt of a million characters."""
    _post(router, "completions", _completion(prompt="word " * (LIMITS.prompt_chars // 5), max_tokens=1))


def control_tokens(router: Router) -> None:
    """prompt_chars: as many spellings of control tokens as are encoded as text, in a prompt of a million characters."""
    words = "word " * (LIMITS.prompt_chars // CONTROL_SPANS // 5 - len("<|im_end|>") // 5)
    _post(router, "completions", _completion(prompt=("<|im_end|>" + words) * CONTROL_SPANS, max_tokens=1))


def many_control_tokens(router: Router) -> None:
    """prompt_chars: a million characters of such spellings."""
    _post(router, "completions", _completion(prompt="<|im_end|>" * (LIMITS.prompt_chars // 10), max_tokens=1))


def messages(router: Router) -> None:
    """messages, content_parts: as many of both."""
    parts = [{"type": "text", "text": "hi"}] * (LIMITS.content_parts // LIMITS.messages)
    _post(
        router, "chat/completions", _chat(messages=[{"role": "user", "content": parts}] * LIMITS.messages, max_tokens=1)
    )


def options(router: Router) -> None:
    """logit_bias_entries, stop_strings, stop_bytes, stop_token_ids, bad_words, bad_word_bytes, bad_word_tokens,
    allowed_token_ids, metadata_entries, label_bytes: all at once.
    """
    fields = _chat(
        logit_bias={str(index % 300): 1 for index in range(LIMITS.logit_bias_entries)},
        stop=["é" * (LIMITS.stop_bytes // 2 - 1) + str(index) for index in range(10)],
        stop_token_ids=[5] * LIMITS.stop_token_ids,
        bad_words=[f"{index} a" for index in range(LIMITS.bad_words)],
        allowed_token_ids=[index % 300 for index in range(LIMITS.allowed_token_ids)],
        metadata={str(index): "x" * LIMITS.label_bytes for index in range(LIMITS.metadata_entries)},
        max_tokens=1000,
    )
    _post(router, "chat/completions", fields)


def invalid_bias(router: Router) -> None:
    """logit_bias_entries: as many that are all wrong."""
    _post(router, "chat/completions", _chat(logit_bias={str(index): "x" for index in range(LIMITS.logit_bias_entries)}))


def choices(router: Router) -> None:
    """choices, output_tokens: as many choices of 1000 tokens, streamed."""
    _post(router, "completions", _completion(n=LIMITS.choices, max_tokens=1000, stream=True))


def choices_of_a_long_prompt(router: Router) -> None:
    """choices: of a prompt of 4096 tokens."""
    _post(router, "completions", _completion(prompt=[5] * 4096, n=LIMITS.choices, max_tokens=1))


def chat_logprobs(router: Router) -> None:
    """logprob_entries, top_logprobs: an answer with as many."""
    _post(router, "chat/completions", _chat(logprobs=True, top_logprobs=20, max_tokens=LOGPROB_TOKENS))


def chat_logprobs_slowly_read(router: Router) -> None:
    """logprob_entries, write_seconds: the same, streamed to a slow reader."""
    body = _chat(logprobs=True, top_logprobs=20, max_tokens=LOGPROB_TOKENS, stream=True)
    _post(router, "chat/completions", body, 0.05)


def completion_logprobs(router: Router) -> None:
    """logprob_entries, top_logprobs: in the format of completions."""
    _post(router, "completions", _completion(logprobs=20, max_tokens=LOGPROB_TOKENS))


def echo(router: Router) -> None:
    """choices, body_bytes: a prompt of 10,000 characters in every choice."""
    _post(router, "completions", _completion(prompt="word " * 2_000, echo=True, n=LIMITS.choices, max_tokens=1))


def streamed_echo(router: Router) -> None:
    """choices, body_bytes: the same, streamed to a slow reader."""
    body = _completion(prompt="word " * 2_000, echo=True, n=LIMITS.choices, max_tokens=1, stream=True)
    _post(router, "completions", body, 0.05)


def grpc_empty_messages(router: Router) -> None:
    """body_bytes: 4 MiB of empty messages over gRPC."""
    size = (LIMITS.body_bytes - 100) // 2 * 2
    _generate(router, b'\x0a\x04tiny"' + _varint(size) + b"\x0a\x00" * (size // 2))


def grpc_messages(router: Router) -> None:
    """messages: as many over gRPC."""
    entries = [ChatMessage(role="user", content="hi")] * LIMITS.messages
    chat = ChatMessages(messages=entries)
    _generate(router, GenerateRequest(model="tiny", chat=chat, options=GenerateOptions(max_tokens=1)))


def grpc_token_ids(router: Router) -> None:
    """body_values: as many token ids over gRPC."""
    ids = TokenIds(ids=[5] * (LIMITS.body_values - 100))
    _generate(router, GenerateRequest(model="tiny", prompt_token_ids=ids, options=GenerateOptions(max_tokens=1)))


def grpc_calls_without_requests(router: Router) -> None:
    """streams_per_connection, body_seconds: as many calls that send nothing."""

    async def call() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc}") as channel:
            calls: list[Any] = [
                channel.stream_stream("/headrace.v1.Inference/Generate")() for _ in range(LIMITS.streams_per_connection)
            ]
            await asyncio.sleep(1)
            for one in calls:
                one.cancel()

    asyncio.run(call())


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


CASES: dict[str, Callable[[Router], None]] = {
    case.__name__.replace("_", " "): case
    for case in (
        idle,
        trailers,
        many_trailers,
        short_headers,
        one_byte_chunks,
        pipelined_requests,
        many_connections,
        tls_handshakes,
        unfinished_heads,
        tls_key_updates,
        keyed_one_byte_chunks,
        keyed_pipelined_requests,
        keyed_short_headers,
        tls_keyed_one_byte_records,
        tls_keyed_key_updates,
        token_ids,
        long_numbers,
        small_objects,
        text_of_commas,
        escapes,
        prompt_chars,
        control_tokens,
        many_control_tokens,
        messages,
        options,
        invalid_bias,
        choices,
        choices_of_a_long_prompt,
        chat_logprobs,
        chat_logprobs_slowly_read,
        completion_logprobs,
        echo,
        streamed_echo,
        grpc_empty_messages,
        grpc_messages,
        grpc_token_ids,
        grpc_calls_without_requests,
    )
}


def measure(names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """By case: lag and processor time in ms, memory in MiB."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    reply = "word " * (2 * LOGPROB_TOKENS)
    replica = FakeReplica(make_tokenizer(), reply=reply, max_model_len=CONTEXT, tokens_per_delta=64, token_seconds=0.01)
    asyncio.run_coroutine_threadsafe(replica.start(), loop).result()
    files = tempfile.TemporaryDirectory()
    tls = Authority(Path(files.name)).issue("server")
    found: dict[str, dict[str, float]] = {}
    for name in names:
        # A new one: memory that an earlier case left is used again without growth.
        router = Router(replica.address, tls if name.startswith("tls") else None)
        try:
            results = []
            for _ in range(rounds):
                router.begin()
                CASES[name](router)
                results.append(router.end())
        finally:
            router.close()
        lags, cpus, memories = zip(*results, strict=True)
        found[name] = {"lag": round(min(lags), 1), "cpu": round(min(cpus), 1), "MiB": round(max(memories), 1)}
        print(f"{name:30} {json.dumps(found[name])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--router", help=argparse.SUPPRESS)
    parser.add_argument("--tls", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.router:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(run_router(options.router, options.tls))
        return
    found = measure(options.cases.split(","), options.rounds)
    if options.save:
        print(machine.save("limits", {"cases": found}))


if __name__ == "__main__":
    main()
