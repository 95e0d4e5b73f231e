"""Weights that stay in the bits of the checkpoint: what is packed, and that no token changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_kernels.cpu import library
from headrace_kernels.packed import Form
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.model.coded import CodedEmbedding, PackedCodes
from headrace_worker.model.load import load
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import OfflineEngine, Prompt

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="no C++ compiler: weights are unpacked")


@pytest.fixture(scope="module", params=["llama", "llama-bias-16", "gemma2", "qwen3"])
def halves(request: pytest.FixtureRequest, half: Callable[[str], Path]) -> Path:
    """A family's tiny model, saved in bfloat16."""
    return half(request.param)


def test_a_bfloat16_checkpoint_stays_as_it_is_with_the_tokens_of_float32(
    halves: Path, replica: Callable[..., ReplicaConfig], add_tokenizer: Callable[[Path], None]
) -> None:
    add_tokenizer(halves)
    model = load(replica(halves))
    packed = [module for module in model.module.modules() if isinstance(module, PackedCodes)]
    assert packed and {module.packed.form for module in packed} == {Form.BFLOAT16}
    whole = load(replica(halves), plan=SurgeryPlan(linears=False))
    assert model.weight_bytes < whole.weight_bytes
    plain = AutoModelForCausalLM.from_pretrained(halves, dtype=torch.float32, attn_implementation="eager").eval()
    engine = OfflineEngine(replica(halves, kv_cache_memory=1 << 26, max_model_len=64), model)
    prompts = [[7, 3, 9, 250, 11], list(range(20, 53))]
    greedy = RowSampling(temperature=0.0)
    found = engine.generate([Prompt(prompt, 12, greedy, ignore_eos=True) for prompt in prompts])
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.inference_mode():
            logits = plain(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen < 1e-3).all())


def test_the_embedded_model_keeps_its_bytes(replica: Callable[..., ReplicaConfig]) -> None:
    model = load(replica("smollm2", block_size=16))
    head, embedding = model.module.lm_head, model.module.model.embed_tokens
    assert isinstance(head, PackedCodes) and isinstance(embedding, CodedEmbedding)
    assert head.packed is embedding.matrix.packed(), "the two are one tensor"
    assert model.weight_bytes < 97_000_000
    assert any("stay packed" in note for note in model.notes)
