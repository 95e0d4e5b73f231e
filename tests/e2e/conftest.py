"""One running `headrace serve` that most tests share, and helpers to start more."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from support.e2e import headrace_process, shared_server
from support.e2e.headrace_process import SMALL, Serve
from support.e2e.metrics_page import Metrics


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shared_server.sort_sharing_files_first(items, Path(__file__).parent)


def pytest_collection_finish(session: pytest.Session) -> None:
    shared_server.record_last_test(session)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    shared_server.stop_after_last_test(item)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Serve]:
    """The embedded model, started by `headrace serve`, with a small KV cache. Tests must not change it."""
    serve = Serve(tmp_path_factory.mktemp("e2e") / "home", *SMALL)
    try:
        pytestconfig.stash[shared_server.SERVER] = serve
        yield serve.await_ready()
    finally:
        serve.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """start(*flags): one more serve, with its own home; it is ended after the test."""
    started: list[Serve] = []

    def make(*flags: str, ports: bool = True) -> Serve:
        serve = Serve(tmp_path / f"home{len(started)}", *flags, ports=ports)
        started.append(serve)
        return serve

    yield make
    for serve in started:
        serve.close()


@pytest.fixture
def http(server: Serve) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def client(server: Serve) -> Iterator[openai.OpenAI]:
    """The official client without retries: tests check the first response."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def metrics(server: Serve) -> Callable[[], Metrics]:
    return lambda: Metrics(server.url)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """eventually(condition, seconds, what): waits until it holds, or fails."""
    return headrace_process.eventually
