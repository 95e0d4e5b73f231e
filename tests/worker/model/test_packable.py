"""Weights that stay in the bits of the checkpoint: what is packed, and that no token changes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headrace_kernels.cpu import library
from headrace_kernels.packed import Form
from headrace_worker.core.plan import RowSampling
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.packable import PackedEmbedding, PackedLinear
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.surgery.native import NativeLayers
from headrace_worker.offline import OfflineEngine, Prompt
from support.worker.tiny_models import replica_config

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="no C++ compiler: weights are unpacked")


@pytest.fixture(scope="module", params=["llama", "llama-bias-16", "gemma2", "qwen3"])
def halves(request: pytest.FixtureRequest, half: Callable[[str], Path]) -> Path:
    """A family's tiny model, saved in bfloat16."""
    return half(request.param)


def test_a_bfloat16_checkpoint_stays_as_it_is_with_the_tokens_of_float32(halves: Path) -> None:
    model = load(replica_config(halves))
    packed = [module for module in model.module.modules() if isinstance(module, PackedLinear)]
    assert packed and {module.packed.form for module in packed} == {Form.BFLOAT16}
    whole = load(replica_config(halves), plan=SurgeryPlan(linears=False))
    assert model.weight_bytes < whole.weight_bytes
    plain = AutoModelForCausalLM.from_pretrained(halves, dtype=torch.float32, attn_implementation="eager").eval()
    engine = OfflineEngine(replica_config(halves, kv_cache_memory=1 << 26, max_model_len=64), model)
    prompts = [[7, 3, 9, 250, 11], list(range(20, 53))]
    greedy = RowSampling(temperature=0.0)
    found = engine.generate([Prompt(prompt, 12, greedy, ignore_eos=True) for prompt in prompts])
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.inference_mode():
            logits = plain(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen < 1e-3).all())


@pytest.mark.parametrize(("arithmetic", "form"), [("exact", Form.FLOAT32), ("bf16", Form.BFLOAT16)])
def test_a_float32_checkpoint_is_packed_in_the_precision_of_its_products(
    arithmetic: str, form: Form, load_tiny: Callable[..., LoadedModel]
) -> None:
    loaded = load_tiny("llama-16", cpu_arithmetic=arithmetic)
    model = loaded.module
    assert bool(loaded.warnings) == (arithmetic == "bf16" and not library.has_bfloat16_products()), loaded.warnings
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert {module.packed.form for module in packed} == {form}
    assert {module.bf16 for module in packed} == {arithmetic == "bf16"}
    (native,) = [module for module in model.modules() if isinstance(module, NativeLayers)]
    assert {product.bf16 for product in [part for layer in native.weights for part in layer.products()]} == {
        arithmetic == "bf16"
    }


def test_arithmetic_in_bfloat16_chooses_nearly_the_same_tokens() -> None:
    """At 98.5 % of a text's positions the most probable token is that of exact products; rows do not change rows."""
    chosen = []
    for arithmetic in ("exact", "bf16"):
        config = replica_config(
            "smollm2", block_size=16, kv_cache_memory=1 << 27, max_model_len=512, cpu_arithmetic=arithmetic,
            max_num_batched_tokens=256,
        )  # fmt: skip
        model = load(config)
        text = (Path(__file__).parents[3] / "LICENSE").read_text()
        ids = Tokenizer.from_str(model.facts.tokenizer_json.decode()).encode(text).ids[:260]
        engine = OfflineEngine(config, model)
        prompt = Prompt(ids, 8, RowSampling(temperature=0.0, prompt_logprobs=1), ignore_eos=True)
        (alone,) = engine.generate([prompt])
        others = [Prompt(ids[start : start + 40], 10, RowSampling(temperature=0.0)) for start in (7, 90)]
        assert engine.generate([*others, prompt])[2].token_ids == alone.token_ids
        chosen.append([found.top_ids[0] for found in alone.prompt_logprobs])
    same = sum(a == b for a, b in zip(*chosen, strict=True))
    assert len(chosen[0]) == 259 and 0.985 * 259 <= same < 259, same


def test_the_embedded_model_keeps_its_bytes() -> None:
    model = load(replica_config("smollm2", block_size=16))
    head, embedding = model.module.lm_head, model.module.model.embed_tokens
    assert isinstance(head, PackedLinear) and isinstance(embedding, PackedEmbedding)
    assert head.packed is embedding.matrix.packed(), "the two are one tensor"
    assert model.weight_bytes < 97_000_000
    assert any("matrices stay packed" in note and "92 MiB" in note for note in model.notes)
