"""A router in front of replicas that are threads of this process."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from headrace_router.config import RouterConfig, StaticMember
from headrace_router.router_server import RouterServer
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.replica import Replica
from support.members import MEMBER, secret_file


class InProcessCluster:
    """Replicas in threads of this process, and a router in front of them on an event loop in another thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.replicas: list[Replica] = []
        self.addresses: list[str] = []
        self._router: RouterServer | None = None

    def add_replica(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "kv_cache_memory": 8 << 20}
        config = ReplicaConfig(
            replica_id=f"tiny-{len(self.replicas)}",
            model="tiny",
            source=str(self._folder),
            **defaults | options,
        )
        replica = Replica(config, MEMBER.secret)
        self.replicas.append(replica)
        self.addresses.append(replica.start().address)

    def open(self, await_ready: bool = True, **options: Any) -> None:
        members = tuple(
            StaticMember(address=address, replica_id=f"tiny-{place}") for place, address in enumerate(self.addresses)
        )
        given: dict[str, Any] = {
            "port": 0,
            "grpc_port": 0,
            "secret_file": secret_file(),
            "members": members,
            "shutdown_seconds": 1.0,
        }

        async def make() -> RouterServer:
            router = RouterServer(RouterConfig(**given | options))
            await router.start()
            return router

        self._router = asyncio.run_coroutine_threadsafe(make(), self._loop).result(30)
        if await_ready:
            self.eventually(lambda: len(self.ready) == len(self.replicas))

    @property
    def ready(self) -> list[str]:
        """Ids of the replicas to which the router can send requests."""
        assert self._router is not None
        return [link.replica_id for link in self._router.services.fleet.replicas if link.ready]

    def running(self) -> dict[str, list[bytes]]:
        """Ids of the attempts that have produced tokens, by replica."""
        assert self._router is not None
        return {
            link.replica_id: [
                attempt.id for attempt in list(link.attempts.values()) if attempt.open and attempt.started
            ]
            for link in self._router.services.fleet.replicas
        }

    def client(self, key: str = "") -> httpx.Client:
        assert self._router is not None
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{self._router.http_port}"
        return httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

    def complete(self, prompt: Sequence[int], key: str = "", **options: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": list(prompt), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with self.client(key) as client:
            return client.post("/v1/completions", json=body | options)

    def eventually(self, condition: Callable[[], object], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.02)

    def close(self) -> None:
        if self._router is not None:
            asyncio.run_coroutine_threadsafe(self._router.stop(), self._loop).result(30)
        for replica in self.replicas:
            replica.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
