"""Loading: all tensors or a clear error, buffers from the config, facts from the files."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_base.errors import DeviceError, ModelLoadError, ModelUnsupportedError
from headrace_worker.device import choice as device
from headrace_worker.device import dtypes
from headrace_worker.model.build_model import build_meta
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.surgery import SurgeryPlan
from support.worker.tiny_models import replica_config, save_tiny


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny untied llama that a test may damage."""
    copy = tmp_path / "model"
    copytree(tiny("qwen3"), copy)
    return copy


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "granite"])
def test_parameters_and_buffers_equal_transformers(
    family: str, tiny: Callable[[str], Path], load_tiny: Callable[..., LoadedModel]
) -> None:
    found = load_tiny(family, SurgeryPlan.none()).module
    expected = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32)
    ours = dict(found.named_parameters()) | dict(found.named_buffers())
    theirs = dict(expected.named_parameters()) | dict(expected.named_buffers())
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0, msg=name)


def test_tied_head_is_one_tensor(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny("llama", SurgeryPlan.none())
    assert model.module.lm_head.weight.data_ptr() == model.module.model.embed_tokens.weight.data_ptr()
    head = model.module.lm_head.weight.nbytes
    total = sum(parameter.nbytes for parameter in model.module.parameters())
    assert model.weight_bytes == total and head < total


def test_missing_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks 1 of .*'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(replica_config(folder))


def test_left_over_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}))
    with pytest.raises(ModelLoadError, match=r"that the model does not have, 'model\.layers\.9"):
        load(replica_config(folder))


def test_wrong_shape(folder: Path) -> None:
    edit_config(folder, intermediate_size=97)
    with pytest.raises(ModelLoadError, match=r"has shape \[.*\], but the config requires"):
        load(replica_config(folder))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "nonsense"}, "'nonsense', which transformers .* does not support"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4.0}}, r"by awq \(4.0 bits\), which is not served"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            r"quantized by gptq \(3 bits\), which is not served",
        ),
        ({"num_attention_heads": 0}, "config|head"),
    ],
)
def test_unsupported_models_are_refused_by_name(fields: dict[str, Any], sentence: str, folder: Path) -> None:
    edit_config(folder, **fields)
    with pytest.raises((ModelUnsupportedError, ModelLoadError), match=sentence):
        load(replica_config(folder, load_format="dummy"))


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        ("rwkv", {}, "keep recurrent state of a kind that is not served"),
        ("recurrent_gemma", {}, "keep recurrent state of a kind that is not served"),
        ("falcon_mamba", {}, "keep recurrent state alone"),
        ("zamba2", {}, "share the modules of attention between layers"),
        ("bamba", {"attn_layer_indices": []}, "no layer of attention, but recurrent state alone"),
        ("jamba", {"num_hidden_layers": 4}, "no layer of attention, but recurrent state alone"),
    ],
)
def test_recurrent_models_are_refused(kind: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=sentence):
        build_meta(AutoConfig.for_model(kind, **fields), torch.float32)


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path) -> None:
    """Its files name code of their own, which is not needed."""
    folder = save_tiny("deepseek_v3", tmp_path)
    plain = load(replica_config(folder), plan=SurgeryPlan.none()).module
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    loaded = load(replica_config(folder), plan=SurgeryPlan.none())
    assert loaded.config.model_type == "deepseek_v3"
    pairs = zip(plain.parameters(), loaded.module.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_dummy_without_weights_or_tokenizer(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    (tmp_path / "config.json").write_bytes((tiny("qwen3") / "config.json").read_bytes())
    plain = SurgeryPlan.none()
    first, second = (load(replica_config(tmp_path, load_format="dummy"), plan=plain) for _ in range(2))
    assert any("random" in note for note in first.notes) and any("byte by byte" in note for note in first.notes)
    tokenizer = Tokenizer.from_str(first.facts.tokenizer_json.decode())
    assert tokenizer.encode("héé").ids == list("héé".encode())
    for (name, a), b in zip(first.module.named_parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all() and a.float().std() > 0, name


def test_deterministic_is_float32_on_a_cpu(folder: Path) -> None:
    assert load(replica_config(folder, deterministic=True, dtype="auto")).dtype is torch.float32
    with pytest.raises(DeviceError, match=r"--deterministic .* --dtype bfloat16"):
        load(replica_config(folder, deterministic=True, dtype="bfloat16"))


def test_deterministic_refuses_models_that_it_does_not_cover(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": 64, "intermediate_size": 32, "num_local_experts": 2}
    AutoConfig.for_model("gpt_oss", **sizes).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupportedError, match=r"--deterministic does not cover .*(experts|router)"):
        load(replica_config(tmp_path, load_format="dummy", deterministic=True))


def test_facts_come_from_the_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 7]})
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": "{{ messages }}", "eos_token": "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    facts = load(replica_config(folder)).facts
    assert facts.eos_token_ids == (2, 7, ord("!"))
    assert facts.defaults == {"temperature": 0.6, "top_k": 20}
    assert facts.chat_template == "{{ messages }}" and facts.special_tokens["eos_token"] == "!"
    assert (facts.max_positions, facts.vocab_size, facts.bos_token_id, facts.add_bos) == (256, 320, 1, False)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0}),
        (
            {"do_sample": True, "temperature": 1, "top_k": -1, "min_p": 0.05},
            {"temperature": 1, "top_k": 0, "min_p": 0.05},
        ),
        ({"max_new_tokens": 300}, {"max_tokens": 300}),
        ({"max_new_tokens": None}, {}),
        ({"max_new_tokens": -1}, {}),
    ],
)
def test_defaults_of_a_generation_config(
    folder: Path, generation: dict[str, object], defaults: dict[str, float]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(replica_config(folder)).facts.defaults == defaults


def test_a_file_replaces_the_chat_template(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0].content }} é")
    assert load(replica_config(folder, chat_template=str(path))).facts.chat_template == "{{ messages[0].content }} é"
    with pytest.raises(ModelLoadError, match=r"--chat-template .*none\.jinja cannot be read \(No such file"):
        load(replica_config(folder, chat_template=str(tmp_path / "none.jinja")))


def test_defaults_of_the_spec_override_the_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 300})
    )
    facts = load(replica_config(folder, defaults={"temperature": 0.0, "max_tokens": 64, "presence_penalty": 0.5})).facts
    assert facts.defaults == {"temperature": 0.0, "top_k": 20, "max_tokens": 64, "presence_penalty": 0.5}


def test_tp_without_ranks_is_refused(folder: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match="tp 2"):
        load(replica_config(folder, tp=2))


def test_device_and_dtype_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="--device cuda"):
        device.open_device("cuda")
    assert device.open_device("auto").torch_device == torch.device("cpu")
    with pytest.raises(DeviceError, match="dtype 'int3' is unknown"):
        device.choose_dtype("int3", "cpu")
    for flags, expected in (({"avx2"}, torch.float32), ({"amx_bf16"}, torch.bfloat16)):
        monkeypatch.setattr(dtypes, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert device.choose_dtype("auto", "cpu") == expected
    assert device.choose_dtype("auto", "cuda") == torch.bfloat16


@pytest.mark.parametrize(
    ("rope", "max_model_len", "sentence"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, None, "dynamic rope scaling"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, None, "--max-model-len 64"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, 65, "--max-model-len 64"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, 64, None),
    ],
)
def test_rope_that_depends_on_other_sequences(
    rope: dict[str, Any], max_model_len: int | None, sentence: str | None, folder: Path
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    edit_config(folder, rope_parameters=rope | (factors if rope["rope_type"] == "longrope" else {}))
    if sentence is None:
        load(replica_config(folder, max_model_len=max_model_len))
        return
    with pytest.raises(ModelUnsupportedError, match=sentence):
        load(replica_config(folder, max_model_len=max_model_len))
