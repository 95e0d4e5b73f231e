"""A replica without an engine that implements the contract with routers."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer

from headrace_proto.replica_pb2 import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_REFUSED,
    FINISH_STOP,
    CacheGroup,
    Delta,
    DescribeChunk,
    GenerationDefaults,
    KvLayout,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Submit,
    TokenLogprobs,
)
from headrace_proto.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from headrace_router.text.detokenize import byte_of_char
from support.members import MEMBER

MODEL = "tiny"
EOS = 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

REPLY = "Hello wörld, this is 日本語 and 🙂 done. END of the story, with more words to come."


@functools.lru_cache(maxsize=4)
def _encode(tokenizer: Tokenizer, reply: str) -> list[int]:
    ids: list[int] = tokenizer.encode(reply, add_special_tokens=False).ids
    return ids


@dataclass
class FakeReplica(ReplicaServicer):
    """Answers every submit with the tokens of `reply`, unless a test configures something else."""

    tokenizer: Tokenizer
    replica_id: str = "r0"
    model: str = MODEL
    revision: str = "rev1"
    generation: int = 1
    reply: str = REPLY
    replies: tuple[str, ...] = ()  # of the first submits, instead of `reply`
    spelled: bool = False  # the reply has a token per byte, as a tokenizer would not encode it
    max_model_len: int = 256
    chat_template: str = TEMPLATE
    named_templates: dict[str, str] = field(default_factory=dict)
    token_seconds: float = 0.0
    tokens_per_delta: int = 1
    first_seconds: float = 0.0
    refuse: bool = False
    die_after: int | None = None  # tokens of an attempt after which the process exits
    end_with_error: bool = False
    not_finite_after: int | None = None  # tokens of an attempt after which the model's output is not finite
    not_finite_left: int = 1 << 30  # attempts that end so
    frozen: bool = False
    cached_tokens: int = 3
    cache_key: bytes = b""  # with one, routers hash the blocks of prompts
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    load: Load = field(default_factory=lambda: Load(kv_usage=0.25, free_blocks=75))
    boot_id: bytes = field(default_factory=lambda: os.urandom(16))
    address: str = ""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    streams: int = 0  # that routers opened
    sent_tokenizers: int = 0
    _outbox: list[Delta] = field(default_factory=list)
    _tasks: dict[bytes, "asyncio.Task[None]"] = field(default_factory=dict)
    _server: Any = None
    _step: int = 0

    async def start(self) -> None:
        self._server = MEMBER.server([("grpc.so_reuseport", 0)])
        add_ReplicaServicer_to_server(self, self._server)
        port = MEMBER.listen(self._server, self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def kill(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._server.stop(0)

    def spelling(self, text: str) -> list[int]:
        """A token for each byte of the text."""
        chars = {byte: char for char, byte in byte_of_char().items()}
        ids: list[Any] = [self.tokenizer.token_to_id(chars[byte]) for byte in text.encode()]
        return ids

    @property
    def last_prompt(self) -> str:
        """The text of the last prompt, with its special tokens."""
        ids = list(self.submits[-1].prompt_token_ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def facts(self) -> ModelFacts:
        return ModelFacts(
            identity=ReplicaIdentity(
                replica_id=self.replica_id,
                generation=self.generation,
                boot_id=self.boot_id,
                model=self.model,
                revision=self.revision,
                dtype="float32",
                kv_layout=KvLayout(version=1, block_size=16, groups=[CacheGroup(num_layers=2)]),
            ),
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.get_vocab_size(),
            eos_token_ids=[EOS],
            chat_template=self.chat_template,
            named_templates=self.named_templates,
            special_tokens={"eos_token": "<|im_end|>"},
            tokenizer_digest=blake3(self.tokenizer.to_str().encode()).digest(),
            kv_blocks=100,
            defaults=self.defaults,
            cache_key=self.cache_key,
        )

    async def Describe(self, request: Any, context: Any) -> AsyncIterator[DescribeChunk]:
        facts = self.facts()
        yield DescribeChunk(facts=facts)
        if request.known_digest != facts.tokenizer_digest and not request.facts_only:
            self.sent_tokenizers += 1
            raw = self.tokenizer.to_str().encode()
            for start in range(0, len(raw), 1 << 20):
                yield DescribeChunk(tokenizer_json=raw[start : start + (1 << 20)])

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[ReplicaFrame]:
        self.streams += 1
        reader = asyncio.create_task(self._read(requests))
        try:
            yield ReplicaFrame(hello=self.facts().identity, step=self._step, load=self.load)
            while True:
                await asyncio.sleep(0.01)
                if self.frozen:
                    continue
                self._step += 1
                deltas, self._outbox = self._outbox, []
                yield ReplicaFrame(step=self._step, deltas=deltas, load=self.load)
        finally:
            reader.cancel()
            for task in self._tasks.values():
                task.cancel()

    async def _read(self, requests: Any) -> None:
        async for frame in requests:
            for submit in frame.submits:
                self.submits.append(submit)
                self._tasks[submit.attempt_id] = asyncio.create_task(self._answer(submit))
            for cancel in frame.cancels:
                self.cancels.append(cancel.attempt_id)
                task = self._tasks.get(cancel.attempt_id)
                if task:
                    task.cancel()

    async def _answer(self, submit: Submit) -> None:
        ident = submit.attempt_id
        if self.refuse:
            self._outbox.append(Delta(attempt_id=ident, finish=FINISH_REFUSED, error="full"))
            return
        await asyncio.sleep(self.first_seconds)
        place = self.submits.index(submit)
        reply = self.replies[place] if place < len(self.replies) else self.reply
        token_ids = [*(self.spelling(reply) if self.spelled else _encode(self.tokenizer, reply)), EOS]
        finish = FINISH_STOP
        if len(token_ids) > submit.sampling.max_tokens:
            token_ids, finish = token_ids[: submit.sampling.max_tokens], FINISH_LENGTH
        first = sent = len(submit.output_token_ids)
        assert list(submit.output_token_ids) == token_ids[:first], "an answer continues after its last token"
        while sent < len(token_ids):
            if self.die_after is not None and sent - first >= self.die_after:
                await asyncio.sleep(0.05)  # for frames that were sent before to arrive
                asyncio.get_running_loop().create_task(self.kill())
                return
            if self.not_finite_left and self.not_finite_after is not None and sent - first >= self.not_finite_after:
                self.not_finite_left -= 1
                self._outbox.append(Delta(attempt_id=ident, first_index=sent, finish=FINISH_ERROR, not_finite=True))
                return
            piece = token_ids[sent : sent + self.tokens_per_delta]
            last = sent + len(piece) == len(token_ids)
            delta = Delta(attempt_id=ident, first_index=sent, token_ids=piece, finish=FINISH_NONE)
            if last:
                delta.finish = finish
                if self.end_with_error:
                    delta.finish, delta.error = FINISH_ERROR, "logits were not finite"
            if sent == first:
                delta.cached_tokens, delta.queue_us = self.cached_tokens, 1500
            if submit.sampling.HasField("logprobs"):
                best = submit.sampling.logprobs
                for offset, token_id in enumerate(piece):
                    delta.logprobs.append(
                        TokenLogprobs(
                            logprob=-0.01 * (sent + offset + 1),
                            top_ids=[token_id, *range(10, 9 + best)][:best],
                            top_logprobs=[-0.01 * (sent + offset + 1) - rank for rank in range(best)],
                        )
                    )
            self._outbox.append(delta)
            sent += len(piece)
            if self.token_seconds:
                await asyncio.sleep(self.token_seconds)
