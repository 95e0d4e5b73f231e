"""Shared by the control plane's tests."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster.fake_driver import FakeDriver


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests neither read nor write the user's own folder or settings."""
    names = ("CONFIG", "ADMIN_KEY", "PORT", "ADMIN_PORT", "CLUSTER", "COMMAND", "HOST")
    for name in (f"HEADRACE_{name}" for name in names):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    return home


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver()
    yield fake
    for replica in fake.replicas.values():
        replica.stop()


@pytest.fixture
def eventually() -> Callable[..., object]:
    """await eventually(condition): waits until it holds, or fails after some seconds."""

    async def wait(condition: Callable[[], object], seconds: float = 30) -> object:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not (value := condition()):
            assert loop.time() < deadline, "the condition did not come true in time"
            await asyncio.sleep(0.02)
        return value

    return wait
