"""What config.json alone shows to be unserved: the same sentence before Ray starts and from a rank."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.model import refusals
from headrace_worker.model.build_model import check_supported, read_config
from headrace_worker.model.headers import check_options, read_headers
from headrace_worker.model.load import load
from headrace_worker.model.source import resolve
from headrace_worker.model.text_part import text_config
from support.worker.tiny_models import TINY, replica_config, save_tiny

TOOLS = Path(__file__).parents[3] / "docs" / "tools.md"
MODELS = TOOLS.with_name("models.md")
LLAMA = {"model_type": "llama"} | TINY
OWN_CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
# Families whose layers, as config.json names them, decide; the default has recurrent ones alone.
BY_LAYERS = {"granitemoehybrid", "bamba"}
# Families with images or audio of which the language model is served, as docs/models.md lists them.
_SERVED, _, _REFUSED = MODELS.read_text().partition("| served |")[2].partition("\n\n")[0].partition(";")
TEXT_PARTS = re.findall(r"`(\w+)`", _SERVED)
WITHOUT = re.findall(r"`([\w-]+)`", _REFUSED.partition("\n")[2])


def outer(family: str, text: str, **fields: Any) -> dict[str, Any]:
    """Fields of a config.json of a family with a language model of the family `text`."""
    return {"model_type": family, "text_config": {"model_type": text} | TINY | fields, "vision_config": {}}


def folder(path: Path, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq, which is not"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantized by hqq, which is not"),
        (
            outer("lfm2_vl", "lfm2", layer_types=["conv"] * 3),
            "lfm2 model has no layer of attention, but recurrent state alone",
        ),
        (outer("llava", "llama", layer_types=["mamba"] * 3), "Layer 0 of this llama model is 'mamba'"),
        (outer("internvl", "qwen2") | {"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq"),
        (
            outer("qwen3_vl", "qwen3_vl_text"),
            r"language model of qwen3_vl \(qwen3_vl_text\) has no causal class of its own",
        ),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {}} | TINY,
            r"language model of qwen2_5_vl \(qwen2_5_vl_text\) has no causal class of its own",
        ),
        (outer("paligemma", "gemma"), "family paligemma are not served: they attend in both directions"),
        (outer("mllama", "mllama_text_model"), "family mllama are not served: they attend to images in layers"),
        ({"model_type": "t5gemma2", "is_encoder_decoder": True}, "t5gemma2 is an encoder-decoder"),
        (outer("vision-text-dual-encoder", "llama"), "none of the families with a text_config that transformers"),
        ({"model_type": "llava", "text_config": []}, "text_config in config.json of this llava model is no object"),
        (outer("llava", ["llama"]), "text_config in config.json of this llava model is no object with a model_type"),  # type: ignore[arg-type]
        ({"model_type": "t5"}, "no causal language model for 't5'"),
        ({"model_type": "nonsense"}, "'nonsense', which transformers .* does not support"),
        (TINY, "has no model_type"),
        ({"auto_map": OWN_CODE}, "own Python code .* not run: pass --trust-remote-code"),
        (LLAMA | {"layer_types": [["attention"]] * 3}, "Layer 0 of this llama model is"),
        ({"model_type": "own", "auto_map": OWN_CODE}, "own Python code .* not run: pass --trust-remote-code"),
        (LLAMA | {"layer_types": ["full_attention", "mamba", "mamba"]}, "Layer 1 of this llama model is 'mamba'"),
        ({"model_type": "mamba2"}, "family mamba2 are not served: they keep recurrent state alone"),
        ({"model_type": "zamba2"}, "family zamba2 are not served: they share the modules of attention"),
        ({"model_type": "zaya"}, "family zaya are not served: they keep recurrent state of a kind that is not"),
        ({"model_type": "dots3_note_text"}, "family dots3_note_text are not served: they select keys by an indexer"),
        ({"model_type": "deepseek_v4"}, "family deepseek_v4 are not served: they compress keys and values of several"),
        ({"model_type": "longcat_flash"}, "family longcat_flash are not served: they attend more than once"),
        ({"model_type": "falcon"}, "family falcon are not served: they compute attention in their own code"),
        ({"model_type": "gpt_neo"}, "family gpt_neo are not served: they compute attention in their own code"),
        (
            LLAMA | {"per_layer_config": {"1": {"num_attention_heads": 2}}},
            "llama model has a num_attention_heads per layer, which is not served: it is 2 and 4",
        ),
        (LLAMA | {"head_dim": 16, "per_layer_config": {"1": {"head_dim": -32}}}, "head_dim of this llama model is -32"),
        (
            LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification, which classif",
        ),
        ({"model_type": "bert"}, "bert model attends in both directions"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "bart is an encoder-decoder"),
        (LLAMA | {"num_attention_heads": [4, 8]}, "num_attention_heads of this llama model is"),
    ],
    ids=lambda value: value.get("model_type", "none") if isinstance(value, dict) else "",
)
def test_before_a_start_and_from_a_rank_in_the_same_words(
    tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    source = folder(tmp_path, **fields)
    with pytest.raises(ModelUnsupportedError, match=sentence) as early:
        read_headers(resolve(str(source), "dummy"))
    with pytest.raises(ModelUnsupportedError) as late:
        load(replica_config(source, load_format="dummy"))
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("length", [None, 128])
def test_rotary_embeddings_are_checked_with_the_length(tmp_path: Path, length: int | None) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
    fields = {"model_type": "phi3"} | TINY | {"rope_scaling": rope, "original_max_position_embeddings": 64}
    source = folder(tmp_path, **fields)
    config = replica_config(source, load_format="dummy", max_model_len=length)
    with pytest.raises(ModelUnsupportedError, match="at 64 tokens: use --max-model-len 64 or less") as early:
        check_options(config, read_headers(resolve(str(source), "dummy")))
    with pytest.raises(ModelUnsupportedError) as late:
        load(config)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("length", [None, 257])
def test_attention_within_chunks_is_served_up_to_one(length: int | None, tmp_path: Path) -> None:
    save_tiny("llama4_text", tmp_path)
    sentence = "within chunks of tokens, which is not served beyond 256 tokens: use --max-model-len 256 or less"
    source = folder(tmp_path, **json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 512})
    config = replica_config(source, max_model_len=length)
    with pytest.raises(ModelUnsupportedError, match=sentence) as early:
        check_options(config, read_headers(resolve(str(source))))
    with pytest.raises(ModelUnsupportedError) as late:
        load(config)
    assert str(early.value) == str(late.value)
    load(replica_config(source, max_model_len=256))


def test_code_of_the_folder_runs_with_the_flag_alone(tmp_path: Path) -> None:
    """The class of the folder's own code is loaded; values of its config are checked as those of others."""
    save_tiny("llama", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "own", "auto_map": OWN_CODE}
    (tmp_path / "configuration_own.py").write_text(
        'from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = "own"\n'
    )
    folder(tmp_path, **fields)
    source = resolve(str(tmp_path))
    read_headers(source, trust_remote_code=True)
    assert type(read_config(source, None, trust_remote_code=True)).__name__ == "OwnConfig"
    folder(tmp_path, **fields | {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(ModelUnsupportedError, match=r"quantized by hqq, which is not"):
        read_headers(source, trust_remote_code=True)


def test_code_of_the_folder_does_not_run_where_transformers_has_the_class(tmp_path: Path) -> None:
    """Older files of a family keep the code that was needed before: NVIDIA's needs packages for GPUs."""
    save_tiny("nemotron_h", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    own = {name: f"modeling_{name}.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}  # of no file
    assert fields["architectures"] == ["NemotronHForCausalLM"]
    folder(tmp_path, **fields | {"auto_map": own})
    read_headers(resolve(str(tmp_path)), trust_remote_code=True)
    loaded = load(replica_config(tmp_path, trust_remote_code=True))
    assert type(loaded.module).__module__.startswith("transformers.models.nemotron_h.")
    folder(tmp_path, **fields | {"auto_map": own, "architectures": ["OtherForCausalLM"]})
    with pytest.raises(ModelUnsupportedError, match="modeling_AutoConfig"):
        load(replica_config(tmp_path, trust_remote_code=True))


def test_a_gguf_is_advised_where_it_can_be_read(tmp_path: Path) -> None:
    for family, advice in (("qwen3", r"safetensors or a GGUF\.$"), ("qwen3_moe", r"safetensors\.$")):
        source = folder(tmp_path, model_type=family, **TINY, quantization_config={"quant_method": "hqq"})
        with pytest.raises(ModelUnsupportedError, match=advice):
            read_headers(resolve(str(source), "dummy"))


def test_the_names_are_those_of_transformers() -> None:
    assert refusals.causal_families() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert refusals.causal_families() <= refusals.known_families() and "t5" in refusals.known_families()
    assert refusals.multimodal_families() == set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    generate = refusals.causal_families() | refusals.multimodal_families()
    assert generate >= refusals.UNSERVED.keys(), "a family that is unknown is refused as such"


def test_every_family_that_a_rank_refuses_is_refused_before_a_start() -> None:
    """By its config with the defaults of its class, as transformers saves it; the kinds of layers may be left out.

    A new family that this test names: tell in `refusals.py` why it is not served.
    """
    served = []
    families = refusals.causal_families() | refusals.multimodal_families()
    drafts = {"gemma4_assistant", "gemma4_unified_assistant"}  # of other models, which they need
    for family in sorted(families - drafts):
        config = CONFIG_MAPPING[family]()
        fields = {key: value for key, value in json.loads(config.to_json_string()).items() if key != "layer_types"}
        early = _refusal(lambda: refusals.check_config_file(family, fields, trust_remote_code=False))  # noqa: B023
        late = _refusal(lambda: check_supported(text_config(config)))  # noqa: B023
        # A family with a text part may differ from what its language model alone would compute.
        by_family = early != late and family in refusals.UNSERVED.keys() & refusals.multimodal_families()
        assert bool(early) == bool(late) or by_family or family in BY_LAYERS, (family, early, late)
        served += [family] if not early else []
    assert len(served) > 110 and len(TEXT_PARTS) == 23 and {*TEXT_PARTS} <= {*served}


def test_the_families_with_images_that_docs_name_as_unserved() -> None:
    assert len(WITHOUT) >= 15
    for family in WITHOUT:
        assert _early(family), family


def test_the_families_with_tools_that_the_engine_loads() -> None:
    """The table of docs/tools.md."""
    _, *rows = re.findall(r"^\| `.*\|.*\|.*\|(.*) \|$", TOOLS.read_text(), re.MULTILINE)
    assert len(rows) == 16
    for row in rows:
        loaded, _, refused = row.partition("not `")
        for family in {*re.findall(r"`(.+?)`", loaded)} - BY_LAYERS:
            assert _early(family) == "", family
        for family in re.findall(r"`(.+?)`", f"`{refused}" if refused else ""):
            assert _early(family) != "", family


def _early(family: str) -> str:
    known = family in CONFIG_MAPPING
    fields = json.loads(CONFIG_MAPPING[family]().to_json_string()) if known else {"model_type": family}
    return _refusal(lambda: refusals.check_config_file(family, fields, trust_remote_code=False))


def _refusal(check: Any) -> str:
    try:
        check()
    except ModelUnsupportedError as error:
        return str(error)
    return ""


def test_the_check_imports_no_torch(tmp_path: Path) -> None:
    source = folder(tmp_path, model_type="nonsense")
    code = (
        "import sys; from headrace_worker.model.headers import read_headers;"
        "from headrace_worker.model.source import resolve\n"
        f"try: read_headers(resolve({str(source)!r}, 'dummy'))\n"
        "except Exception as error: print(error)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sentence, loaded = done.stdout.splitlines()
    assert "'nonsense'" in sentence and loaded == "[]"
