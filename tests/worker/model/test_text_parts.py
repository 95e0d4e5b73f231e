"""Checkpoints with images: their language model alone is read, whatever the layout of names, and its facts are used.

That it generates the tokens of the whole checkpoint's class is tested in `tests/worker/parallel/test_shard_oracle.py`.
"""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.build_model import build_meta
from headrace_worker.model.headers import check_options, read_headers
from headrace_worker.model.load import load
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.text_part import TextNames, text_config
from support.ranks.families import tiny_options
from support.worker.tiny_models import OTHER_CACHES, TINY, replica_config, save_random


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tiny_options("llava_next"), tmp_path_factory.mktemp("llava"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A tiny checkpoint with images, which a test may change."""
    return copytree(saved, tmp_path / "model")


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def plain(folder: Path) -> PreTrainedModel:
    """Its module with weights as they are."""
    return load(replica_config(folder), plan=SurgeryPlan.none()).module


def names_of(family: str, **fields: Any) -> TextNames:
    config = AutoConfig.for_model(**tiny_options(family) | fields)
    return TextNames(config, build_meta(text_config(config), torch.float32))


@pytest.mark.parametrize(
    ("family", "stored", "name"),
    [
        # as transformers saves them, and before version 4.52
        ("llava_next", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("llava_next", "language_model.lm_head.weight", "lm_head.weight"),
        ("llava_next", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias", None),
        ("llava_next", "multi_modal_projector.linear_1.weight", None),
        ("llava_next", "image_newline", None),
        # the names in the class
        ("llava_next", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("llava_next", "lm_head.weight", "lm_head.weight"),
        ("llava_next", "model.vision_tower.encoder.layers.0.mlp.fc1.bias", None),
        ("llava_next", "model.image_newline", None),
        # of versions that doubled a prefix
        ("gemma3", "model.language_model.model.norm.weight", "model.norm.weight"),
        ("gemma3", "mtp.layers.0.proj.weight", None),
        ("gemma3", "vision_tower_2.weight", "vision_tower_2.weight"),
        ("gemma3", "model.audio_tower.weight", "model.audio_tower.weight"),
    ],
)
def test_names_of_every_layout(family: str, stored: str, name: str | None) -> None:
    assert names_of(family)(stored) == name


def test_llama_4_gets_the_weights_of_its_language_model(tmp_path: Path) -> None:
    """The class of the whole checkpoint fails with text alone in transformers 5.24, so its tokens are not compared."""
    vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
    vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    text = {"model_type": "llama4_text"} | TINY | OTHER_CACHES["llama4_text"]
    folder = save_random({"model_type": "llama4", "text_config": text, "vision_config": vision}, tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    theirs, mine = whole.language_model.state_dict(), plain(folder).state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_module_named_otherwise() -> None:
    """The language model of Idefics 3 is `text_model`."""
    others = {"vision_config": tiny_options("gemma3")["vision_config"]}
    options = {"model_type": "idefics3", "text_config": tiny_options("llava_next")["text_config"]} | others
    config = AutoConfig.for_model(**options)
    names = TextNames(config, build_meta(text_config(config), torch.float32))
    assert names("model.text_model.norm.weight") == "model.norm.weight"
    assert names("model.vision_model.post_layernorm.bias") is names("model.connector.modality_projection.proj.weight")


def test_the_language_model_alone_is_read(folder: Path) -> None:
    model = load(replica_config(folder))
    stored = load_file(folder / "model.safetensors")
    assert type(model.module).__name__ == "LlamaForCausalLM"
    expected = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("language_model."))
    assert model.read_bytes == expected < sum(tensor.nbytes for tensor in stored.values())
    headers = read_headers(resolve(str(folder)))
    assert headers.elements * 4 <= model.weight_bytes < headers.elements * 4 * 1.05, "a lower bound without other parts"


def test_the_layout_of_names_does_not_matter(folder: Path) -> None:
    before = plain(folder).state_dict()

    newer = {"language_model.lm_head": "lm_head", "language_model.model": "model.language_model"}
    newer |= {part: f"model.{part}" for part in ("vision_tower", "multi_modal_projector", "image_newline")}

    def rename(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace(old, new): t for name, t in stored.items() for old, new in newer.items() if old in name}

    change_tensors(folder, rename)
    after = plain(folder).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert read_headers(resolve(str(folder))).elements > 0


def test_tensors_of_no_part_are_an_error(folder: Path) -> None:
    change_tensors(folder, lambda stored: stored | {"language_model.model.layers.0.mlp.gate.weight": torch.ones(4)})
    with pytest.raises(ModelLoadError, match=r"1 tensors that the model does not have.*layers.0.mlp.gate.weight"):
        load(replica_config(folder))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda stored: {name: t for name, t in stored.items() if "model.norm" not in name})
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the model's .* 'model.norm.weight'"):
        load(replica_config(folder))


def test_weights_in_bfloat16_stay_so(folder: Path) -> None:
    whole = load(replica_config(folder)).weight_bytes
    change_tensors(folder, lambda stored: {name: tensor.bfloat16() for name, tensor in stored.items()})
    assert load(replica_config(folder)).weight_bytes < 0.6 * whole


@pytest.mark.parametrize("tied", [True, False])
def test_the_outer_config_ties_the_embedding(folder: Path, tied: bool) -> None:
    """Not that of the language model, which says otherwise here."""
    fields = json.loads((folder / "config.json").read_text())
    change_config(
        folder, tie_word_embeddings=tied, text_config=fields["text_config"] | {"tie_word_embeddings": not tied}
    )
    if tied:
        change_tensors(folder, lambda stored: {name: t for name, t in stored.items() if "lm_head" not in name})
    module = plain(folder)
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) is tied


def test_facts_are_those_of_the_language_model_and_the_processor(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    text = fields["text_config"] | {"max_position_embeddings": 128, "eos_token_id": 7}
    change_config(folder, text_config=text, eos_token_id=[2, 9])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    source = resolve(str(folder))
    with pytest.raises(ModelUnsupportedError, match="129 is beyond the 128 positions"):
        check_options(replica_config(folder, max_model_len=129), read_headers(source))
    facts = load(replica_config(folder)).facts
    assert (facts.max_positions, facts.eos_token_ids, facts.chat_template) == (128, (2, 9), template)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load(replica_config(folder)).facts.chat_template == "{{ messages[0].content }}"
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="has no text as its chat_template"):
        load(replica_config(folder))


def test_random_weights_need_no_other_part(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = load(replica_config(folder, load_format="dummy"))
    assert model.config.model_type == "llama" and model.layout.groups


def test_a_part_that_cannot_be_built_is_named(folder: Path) -> None:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 7, "num_attention_heads": 2}
    change_config(folder, vision_config=vision)
    with pytest.raises(ModelLoadError, match=r"this llava_next checkpoint .* build its other parts: embed_dim must"):
        load(replica_config(folder))
