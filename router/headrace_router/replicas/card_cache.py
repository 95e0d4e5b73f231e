"""Model cards and tokenizers, shared by the replicas of one model."""

import asyncio
import hashlib
from weakref import WeakValueDictionary

import structlog
from blake3 import blake3

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.text.model_card import LoadedTokenizer, ModelCard, ModelFactsError

MAX_TOKENIZERS = 8

log = structlog.get_logger("headrace.router.models")


class CardCache:
    """Tokenizers by digest, cards by facts. Parsing happens in a thread; used from the event loop only."""

    def __init__(self) -> None:
        self.newest_digest = b""
        self._tokenizers: dict[bytes, LoadedTokenizer] = {}
        self._cards: dict[bytes, ModelCard] = {}
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def has_tokenizer(self, digest: bytes) -> bool:
        """Whether `card` needs no tokenizer.json for it."""
        return digest in self._tokenizers

    def fetching(self, digest: bytes) -> asyncio.Lock:
        """Held by the link that fetches this tokenizer: the others wait for it."""
        return self._locks.setdefault(b"fetch" + digest, asyncio.Lock())

    async def add_tokenizer(self, digest: bytes, tokenizer_json: bytes) -> None:
        """Raises ModelFactsError when tokenizer and digest do not match."""
        await self._loaded(digest, tokenizer_json)

    async def card(self, facts: ModelFacts) -> ModelCard:
        """The card for these facts. Raises ModelFactsError if their tokenizer was not added."""
        key = hashlib.blake2b(_shared_part(facts), digest_size=16).digest()
        async with self._locks.setdefault(key, asyncio.Lock()):  # a template that compiles slowly delays its model only
            if key not in self._cards:
                loaded = await self._loaded(facts.tokenizer_digest)
                card = await asyncio.to_thread(_checked, facts, loaded)
                if len(self._cards) >= MAX_TOKENIZERS:
                    self._cards.pop(next(iter(self._cards)))
                self._cards[key] = card
            return self._cards[key]

    async def _loaded(self, digest: bytes, tokenizer_json: bytes = b"") -> LoadedTokenizer:
        async with self._locks.setdefault(b"tokenizer" + digest, asyncio.Lock()):
            loaded = self._tokenizers.get(digest)
            if loaded is None:
                if not tokenizer_json:
                    self.newest_digest = b""
                    raise ModelFactsError("the replica sent no tokenizer")
                loaded = await asyncio.to_thread(_load, tokenizer_json, digest)
                self._keep(digest, loaded)
            return loaded

    def _keep(self, digest: bytes, loaded: LoadedTokenizer) -> None:
        if len(self._tokenizers) >= MAX_TOKENIZERS:
            self._tokenizers.pop(next(iter(self._tokenizers)))
        self._tokenizers[digest] = loaded
        self.newest_digest = digest


def _shared_part(facts: ModelFacts) -> bytes:
    """Facts without the fields that differ between replicas of one model."""
    shared = ModelFacts()
    shared.CopyFrom(facts)
    model, revision = facts.identity.model, facts.identity.revision
    shared.ClearField("identity")
    shared.ClearField("kv_blocks")
    shared.ClearField("cache_key")
    shared.identity.model, shared.identity.revision = model, revision
    return shared.SerializeToString(deterministic=True)


def _checked(facts: ModelFacts, loaded: LoadedTokenizer) -> ModelCard:
    card = ModelCard(facts, loaded)
    if card.turn_problem:
        log.warning("turns part", model=card.model, reason=card.turn_problem)
    return card


def _load(tokenizer_json: bytes, digest: bytes) -> LoadedTokenizer:
    if digest and blake3(tokenizer_json).digest() != digest:
        raise ModelFactsError("the replica's tokenizer does not have the digest that it states")
    return LoadedTokenizer(tokenizer_json)
