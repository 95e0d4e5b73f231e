"""Completes a batch of prompts with the engine alone, without Ray, gRPC or HTTP: python examples/offline_batch.py"""

import os
import time

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch: idle threads leave the cores to others

from tokenizers import Tokenizer

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.offline import OfflineEngine, Prompt

PROMPTS = ["The capital of France is", "Water boils at a temperature of", "The largest planet of the solar system is"]

config = ReplicaConfig(replica_id="offline", model="smollm2", source="smollm2", max_model_len=512)
engine = OfflineEngine(config)
tokenizer = Tokenizer.from_buffer(engine.assembly.model.facts.tokenizer_json)
began = time.monotonic()
completions = engine.generate([Prompt(tokenizer.encode(text).ids, max_tokens=24) for text in PROMPTS])
seconds = time.monotonic() - began
for text, completion in zip(PROMPTS, completions, strict=True):
    print(f"{text} →{tokenizer.decode(completion.token_ids)!r}")
tokens = sum(len(completion.token_ids) for completion in completions)
print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tok/s")
