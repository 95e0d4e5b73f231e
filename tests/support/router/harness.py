"""An event loop in a thread, with fake replicas and one router on it."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import httpx

from headrace_router.config import RouterConfig, StaticMember
from headrace_router.router_server import RouterServer
from support.members import secret_file
from support.router.fake_replica import FakeReplica


class Harness:
    """An event loop in a thread, with fake replicas and one router on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.replicas: list[FakeReplica] = []
        self.router: RouterServer | None = None

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def start(self, replicas: list[FakeReplica], wait: bool = True, **config: Any) -> RouterServer:
        self.replicas = replicas
        for replica in replicas:
            self.call(replica.start())
        members = tuple(StaticMember(address=replica.address, replica_id=replica.replica_id) for replica in replicas)
        given: dict[str, Any] = {"port": 0, "grpc_port": 0, "members": members, "shutdown_seconds": 1.0}

        async def make() -> RouterServer:
            router = RouterServer(RouterConfig(**given | {"secret_file": secret_file()} | config))
            await router.start()
            return router

        self.router = self.call(make())
        if wait:
            for _ in range(500):
                if sum(link.ready for link in self.router.services.fleet.replicas) == len(replicas):
                    break
                time.sleep(0.01)
        return self.router

    @property
    def url(self) -> str:
        assert self.router is not None
        return f"http://127.0.0.1:{self.router.http_port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)

    def close(self) -> None:
        if self.router is not None:
            self.call(self.router.stop())
        for replica in self.replicas:
            self.call(replica.kill())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
