"""The engine as a library: token ids in, token ids out, without Ray, gRPC or HTTP."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace_worker.assembly.assemble import Assembly, assemble
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.guide import TokenGuide
from headrace_worker.core.plan import RowSampling, SampledLogprobs
from headrace_worker.core.request import Finish, Request
from headrace_worker.model.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. Stop ids are the model's end-of-sequence ids unless `ignore_eos`."""

    token_ids: Sequence[int]
    max_tokens: int
    sampling: RowSampling = field(default_factory=lambda: RowSampling(temperature=0.0))
    ignore_eos: bool = False
    tenant_salt: bytes = b""
    guide: Callable[[], TokenGuide] | None = None  # creates a guide in its initial state


@dataclass(slots=True)
class Completion:
    """The result of a prompt; times are seconds since the call."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledLogprobs] = field(default_factory=list)
    prompt_logprobs: list[SampledLogprobs] = field(default_factory=list)  # the first token has none
    finish: Finish | None = None
    error: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0


class OfflineEngine:
    """Generates for batches of prompts with continuous batching."""

    def __init__(self, engine: ReplicaConfig | Assembly, model: LoadedModel | None = None) -> None:
        """`engine`: a configuration to assemble one for, or an assembled one, possibly of several ranks.

        On a CPU the thread that assembles an engine also generates: any other computes with one thread (`use_threads`).
        """
        self.assembly = engine if isinstance(engine, Assembly) else assemble(engine, model=model)

    def generate(self, prompts: Sequence[Prompt], after_step: Callable[[], None] = lambda: None) -> list[Completion]:
        """Completions in the order of the prompts. `after_step` is called after every step."""
        engine = self.assembly.engine
        started = time.monotonic()
        completions: dict[bytes, Completion] = {}
        for prompt in prompts:
            request = self._request(prompt)
            completions[request.attempt_id] = Completion()
            refusal = engine.submit(request)
            if refusal is not None:
                raise ValueError(refusal.error)
        while engine.has_work:
            for output in engine.step():
                completion = completions[output.attempt_id]
                now = time.monotonic() - started
                if not completion.token_ids:
                    completion.first_token_at = now
                completion.token_ids += output.token_ids
                completion.logprobs += output.logprobs
                completion.prompt_logprobs += output.prompt_logprobs
                completion.last_token_at = now
                completion.finish = output.finish
                completion.error = output.error
                completion.preemptions = output.preemptions
                if output.cached_tokens is not None:
                    completion.cached_tokens = output.cached_tokens
            after_step()
        return list(completions.values())

    def _request(self, prompt: Prompt) -> Request:
        stop_ids = set(prompt.sampling.stop_token_ids)
        if not prompt.ignore_eos:
            stop_ids |= set(self.assembly.model.facts.eos_token_ids)
        tokens = list(prompt.token_ids)
        if not 0 < len(tokens) < self.assembly.max_model_len:
            raise ValueError(f"a prompt has 1 to {self.assembly.max_model_len - 1} tokens, this one has {len(tokens)}")
        return Request(
            attempt_id=os.urandom(16),
            tokens=tokens,
            prompt_len=len(tokens),
            max_len=min(len(tokens) + prompt.max_tokens, self.assembly.max_model_len),
            sampling=msgspec.structs.replace(prompt.sampling, stop_token_ids=tuple(sorted(stop_ids))),
            stop_ids=frozenset(stop_ids),
            chain=self.assembly.kv.start_chain(prompt.tenant_salt, ""),
            arrival=time.monotonic(),
            guide=prompt.guide() if prompt.guide is not None else None,
        )
