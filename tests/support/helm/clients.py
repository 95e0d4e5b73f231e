"""Clients of a release, of the routers that a Service would choose: a steady rate of requests, each on a connection of
its own, and beside it one client over HTTP and one over gRPC that keep their connections.
"""

import asyncio
import json
import threading
import time
from random import Random
from types import TracebackType
from typing import Any

import aiohttp
import grpc
import httpx

from headrace_proto.inference_pb2 import GenerateOptions, GenerateRequest, TokenIds
from headrace_proto.inference_pb2_grpc import InferenceStub
from support.helm.processes import Release

TOKENS = 16


class Clients:
    """Sends requests inside a `with` block, and waits for all answers at its end."""

    def __init__(
        self, release: Release, what: str, routers: int = 2, per_second: float = 6.0, tokens: int = TOKENS
    ) -> None:
        self.sent = 0
        self.failed: list[str] = []
        self.seconds = 0.0
        self._release, self._what, self._rate, self._tokens = release, what, per_second, tokens
        self._probe = release.pod("router").containers[0]["readinessProbe"]
        self._ready = dict.fromkeys(range(routers), True)
        self._random = Random(0)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch),
            threading.Thread(target=lambda: asyncio.run(self._run())),
        ]

    def __enter__(self) -> "Clients":
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        time.sleep(2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._began
        time.sleep(2)
        self._over.set()
        for thread in self._threads:
            thread.join(120)
        print(f"{self._what}: {len(self.failed)} failed of {self.sent}, {self.seconds:.0f} s", flush=True)
        if error is None:
            assert self.sent and not self.failed, self.failed[:3]

    def _watch(self) -> None:
        """The kubelet's probes, by which a Service chooses."""
        misses = dict.fromkeys(self._ready, 0)
        while not self._over.wait(self._probe["periodSeconds"]):
            for number in self._ready:
                url = f"http://{self._release.router_address(number)}:8003{self._probe['httpGet']['path']}"
                try:
                    good = httpx.get(url, timeout=self._probe["timeoutSeconds"], trust_env=False).status_code == 200
                except httpx.TransportError:
                    good = False
                misses[number] = 0 if good else misses[number] + 1
                self._ready[number] = misses[number] < self._probe["failureThreshold"]

    async def _run(self) -> None:
        key = self._release.secret("api-keys").splitlines()[0].rpartition(":")[2]
        options: dict[str, Any] = {
            "timeout": aiohttp.ClientTimeout(total=90),
            "connector": aiohttp.TCPConnector(limit=0, force_close=True),
            "headers": {"Authorization": f"Bearer {key}"},
        }
        kept = [asyncio.create_task(self._keep_http(key)), asyncio.create_task(self._keep_grpc(key))]
        async with aiohttp.ClientSession(**options) as session:
            running: set[asyncio.Task[bool]] = set()
            while not self._over.is_set():
                task = asyncio.create_task(self._ask(session))
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(self._random.expovariate(self._rate))
            await asyncio.gather(*running, *kept)

    def _router(self) -> str:
        """The address of a router that is ready; empty without any, which counts as a failed request."""
        ready = [number for number, good in self._ready.items() if good]
        if not ready:
            self.failed.append("no router is ready: a Service has no endpoint")
        return self._release.router_address(self._random.choice(ready)) if ready else ""

    def _prompt(self) -> list[int]:
        return [self._random.randrange(10, 300) for _ in range(16)]

    async def _ask(self, session: aiohttp.ClientSession, address: str = "") -> bool:
        """One request; whether the connection may be used again."""
        address = address or self._router()
        if not address:
            return False
        body = {"model": "tiny", "prompt": self._prompt(), "max_tokens": self._tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        self.sent += 1
        try:
            async with session.post(f"http://{address}:8000/v1/completions", json=body) as answer:
                text = await answer.text()
                if answer.status != 200 or _tokens(text) != self._tokens:
                    self.failed.append(f"{answer.status} {text[-300:]}")
                return answer.headers.get("connection") != "close"
        except Exception as error:
            self.failed.append(repr(error))
            return False

    async def _keep_http(self, key: str) -> None:
        """One request after the other on a connection, until it is closed."""
        headers, connector = {"Authorization": f"Bearer {key}"}, aiohttp.TCPConnector
        while not self._over.is_set():
            address = self._router()
            async with aiohttp.ClientSession(connector=connector(limit=1), headers=headers) as session:
                while address and await self._ask(session, address) and not self._over.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            await asyncio.sleep(0.2)

    async def _keep_grpc(self, key: str) -> None:
        """One call after the other on a channel with both addresses, as of a headless Service."""
        addresses = ",".join(f"{self._release.router_address(number)}:8001" for number in self._ready)
        options = GenerateOptions(max_tokens=self._tokens, ignore_eos=True)
        async with grpc.aio.insecure_channel(f"ipv4:{addresses}") as channel:
            while not self._over.is_set():
                request = GenerateRequest(model="tiny", prompt_token_ids=TokenIds(ids=self._prompt()), options=options)
                self.sent += 1
                try:
                    metadata = [("authorization", f"Bearer {key}")]
                    call = InferenceStub(channel).Generate(request, timeout=90, metadata=metadata)
                    count = sum([len(event.token_ids) async for event in call])
                    if count != self._tokens:
                        self.failed.append(f"gRPC: {count} tokens")
                except Exception as error:
                    self.failed.append(repr(error))
                await asyncio.sleep(0.2)


def _tokens(text: str) -> int:
    """Of a whole stream; 0 if it has an error or no end."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return 0
    usages = [usage for event in events[:-1] if (usage := json.loads(event).get("usage"))]
    return int(usages[-1]["completion_tokens"]) if usages else 0
