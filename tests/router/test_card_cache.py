"""Cards of models are made side by side, each once."""

import asyncio
import threading
from typing import Any

import pytest
from blake3 import blake3

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.replicas import card_cache
from headrace_router.replicas.card_cache import CardCache
from headrace_router.text.model_card import ModelCard


def test_a_card_that_is_made_slowly_delays_no_other_model(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tokenizer.to_str().encode()
    others_done = threading.Event()
    made: list[str] = []

    def make(facts: ModelFacts, loaded: Any) -> ModelCard:
        if facts.chat_template == "slow":
            assert others_done.wait(30)
        made.append(facts.chat_template)
        return ModelCard(facts, loaded)

    monkeypatch.setattr(card_cache, "ModelCard", make)

    async def run() -> None:
        cache = CardCache()
        facts = {name: ModelFacts(chat_template=name, tokenizer_digest=blake3(spec).digest()) for name in ("slow", "b")}
        await cache.add_tokenizer(blake3(spec).digest(), spec)
        slow = [asyncio.create_task(cache.card(facts["slow"])) for _ in range(2)]
        await asyncio.sleep(0)
        other = await cache.card(facts["b"])
        assert other is await cache.card(facts["b"])
        others_done.set()
        first, second = await asyncio.gather(*slow)
        assert first is second

    asyncio.run(asyncio.wait_for(run(), 20))
    assert made == ["b", "slow"]
