"""The embedded real model: its greedy tokens equal plain transformers with the same weights, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headrace_worker.model.build import read_config
from headrace_worker.model.gguf import GgufWeights
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.source import resolve

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [CHAT, "The three primary colours are", "def fibonacci(n):\n"]
COUNT = 12


@pytest.fixture(scope="module")
def smollm2(replica: Callable[..., Any]) -> LoadedModel:
    return load(replica("smollm2", block_size=16))


@pytest.fixture(scope="module")
def expected(smollm2: LoadedModel) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Per text: prompt, greedy tokens, and the logits that they were chosen from [COUNT, V]."""
    file = GgufFile(resolve("smollm2").path)
    weights = GgufWeights(file)
    plain = AutoModelForCausalLM.from_config(read_config(resolve("smollm2"), file), dtype=torch.float32).eval()
    missing = plain.load_state_dict({name: weights.read(name) for name in weights}, strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    plain.tie_weights()
    tokenizer = Tokenizer.from_str(smollm2.facts.tokenizer_json.decode())
    found = []
    for text in TEXTS:
        prompt = tokenizer.encode(text).ids
        out = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=COUNT,
            max_new_tokens=COUNT,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found.append((prompt, out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))
    return found


@pytest.mark.parametrize("chunk", [10_000, 16])
def test_tokens_equal_transformers(
    chunk: int, smollm2: LoadedModel, expected: list[tuple[list[int], list[int], torch.Tensor]], driver: Any
) -> None:
    prompts = {row: prompt for row, (prompt, _, _) in enumerate(expected)}
    found = driver(smollm2).generate(prompts, COUNT, chunk)
    for row, (_, tokens, logits) in enumerate(expected):
        for step, (ours, theirs) in enumerate(zip(found[row], tokens, strict=True)):
            if ours != theirs:
                best = logits[step].topk(2).values
                assert best[0] - best[1] < 1e-3, f"text {row} differs at token {step}, and it is not a tie"
                break


def test_its_requests_have_bounded_greedy_defaults(smollm2: LoadedModel) -> None:
    assert smollm2.facts.defaults == {"max_tokens": 512, "temperature": 0.0, "top_p": 0.9}


def test_it_answers(smollm2: LoadedModel, driver: Any) -> None:
    tokenizer = Tokenizer.from_str(smollm2.facts.tokenizer_json.decode())
    answer = driver(smollm2).generate({0: tokenizer.encode(CHAT).ids}, 7)[0]
    assert "Paris" in tokenizer.decode(answer)
    assert smollm2.weight_bytes == 538_060_032 and smollm2.dtype_name == "float32"
