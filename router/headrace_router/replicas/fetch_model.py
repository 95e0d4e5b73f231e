"""What a replica reports of its model. Replicas share their tokenizers: one link fetches each, the others wait."""

import asyncio
from typing import Any

import grpc

from headrace_proto.replica_pb2 import DescribeChunk, DescribeRequest, ModelFacts
from headrace_router.replicas.card_cache import CardCache
from headrace_router.text.model_card import ModelCard, ModelFactsError

CHUNK_SECONDS = 10.0  # a replica that sends nothing for so long delays the others of its model no longer
FETCH_SECONDS = 60.0


async def fetch_model(stub: Any, cards: CardCache, metadata: Any) -> tuple[ModelFacts, ModelCard]:
    """The facts of the replica, and the card of its model. stub: of headrace.v1.Replica; metadata: of its calls.

    A tokenizer has megabytes: while one link fetches it, those of other replicas with the same digest wait. If that
    fetch fails, the next one of them fetches.
    Raises ModelFactsError, AioRpcError and TimeoutError.
    """
    request = DescribeRequest(known_digest=cards.newest_digest, facts_only=True)
    facts, _ = await _describe(stub.Describe(request, metadata=metadata))
    digest = facts.tokenizer_digest
    if not cards.has_tokenizer(digest):
        async with cards.fetching(digest):
            if not cards.has_tokenizer(digest):
                facts, tokenizer_json = await _describe(stub.Describe(DescribeRequest(), metadata=metadata))
                await cards.add_tokenizer(facts.tokenizer_digest, tokenizer_json)
    return facts, await cards.card(facts)


async def _describe(call: Any) -> tuple[ModelFacts, bytes]:
    facts: ModelFacts | None = None
    tokenizer_json = bytearray()
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            while (chunk := await _read(call)) is not None:
                if not chunk.HasField("facts"):
                    tokenizer_json += chunk.tokenizer_json
                    continue
                facts = chunk.facts
    finally:
        call.cancel()
    if facts is None:
        raise ModelFactsError("the replica described no model")
    return facts, bytes(tokenizer_json)


async def _read(call: Any) -> DescribeChunk | None:
    async with asyncio.timeout(CHUNK_SECONDS):
        chunk: DescribeChunk | Any = await call.read()
    return None if chunk is grpc.aio.EOF else chunk
