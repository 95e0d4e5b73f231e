"""Replicas of one model: its tokenizer is fetched once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from blake3 import blake3

from headrace_proto.replica_pb2 import DescribeChunk, DescribeRequest, ModelFacts
from headrace_router.replicas import replica_link as module
from headrace_router.replicas.card_cache import CardCache
from headrace_router.replicas.replica_link import fetch_model
from headrace_router.text.model_card import ModelFactsError

Fault = Callable[[], Awaitable[None]]


class FakeCall:
    def __init__(self, chunks: list[DescribeChunk], fault: Fault | None) -> None:
        self._chunks = chunks
        self._fault = fault

    async def read(self) -> Any:
        await asyncio.sleep(0)
        chunk: Any = self._chunks.pop(0) if self._chunks else grpc.aio.EOF
        if self._fault is not None and chunk is not grpc.aio.EOF and not chunk.HasField("facts"):
            await self._fault()
        return chunk

    def cancel(self) -> None:
        self._chunks.clear()


class FakeStub:
    """A replica; counts the tokenizers that it sends."""

    def __init__(self, spec: bytes, template: str, sent: Counter[str]) -> None:
        self.facts = ModelFacts(chat_template=template, tokenizer_digest=blake3(spec).digest(), kv_blocks=7)
        self.fault: Fault | None = None
        self._spec = spec
        self._sent = sent

    def Describe(self, request: DescribeRequest, metadata: object) -> FakeCall:
        chunks = [DescribeChunk(facts=self.facts)]
        known = request.known_digest == self.facts.tokenizer_digest
        if not known and not request.facts_only:
            self._sent[self.facts.chat_template] += 1
            half = len(self._spec) // 2
            chunks += [DescribeChunk(tokenizer_json=part) for part in (self._spec[:half], self._spec[half:])]
        return FakeCall(chunks, self.fault)


@pytest.fixture
def spec(tokenizer: Any) -> bytes:
    text: str = tokenizer.to_str()
    return text.encode()


async def _fetch_all(stubs: list[FakeStub]) -> list[Any]:
    cards = CardCache()
    fetches = [asyncio.create_task(fetch_model(stub, cards, None)) for stub in stubs]
    return await asyncio.wait_for(asyncio.gather(*fetches, return_exceptions=True), 20)


def test_one_of_many_links_fetches_the_tokenizer(spec: bytes) -> None:
    """A router of 1,000 replicas fetched 9 GB when it started."""
    sent: Counter[str] = Counter()
    found = asyncio.run(_fetch_all([FakeStub(spec, "a", sent) for _ in range(50)]))
    assert sent == {"a": 1}
    assert all(facts.kv_blocks == 7 and card is found[0][1] for facts, card in found)


def test_models_with_other_tokenizers_are_fetched_side_by_side(spec: bytes) -> None:
    sent: Counter[str] = Counter()
    held = asyncio.Event()
    first, second = FakeStub(spec, "a", sent), FakeStub(spec + b" ", "b", sent)

    async def wait_for_the_other() -> None:
        await asyncio.wait_for(held.wait(), 10)

    async def release() -> None:
        held.set()

    first.fault, second.fault = wait_for_the_other, release
    found = asyncio.run(_fetch_all([first, second, FakeStub(spec, "a", sent)]))
    assert sent == {"a": 1, "b": 1}
    assert not any(isinstance(entry, BaseException) for entry in found)


@pytest.mark.parametrize("kind", ["error", "silence", "content"])
def test_another_link_fetches_if_the_first_one_fails(spec: bytes, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_SECONDS", 0.2)
    sent: Counter[str] = Counter()
    stubs = [FakeStub(spec, "a", sent) for _ in range(5)]

    async def fail() -> None:
        if kind == "error":
            raise ConnectionError("lost")
        await asyncio.sleep(30)

    if kind == "content":
        stubs[0]._spec = spec + b" "
    else:
        stubs[0].fault = fail
    found = asyncio.run(_fetch_all(stubs))
    expected = {"error": ConnectionError, "silence": TimeoutError, "content": ModelFactsError}[kind]
    assert isinstance(found[0], expected)
    assert all(not isinstance(entry, BaseException) for entry in found[1:]) and sent == {"a": 2}
