"""Reading GGUF: weights, config and tokenizer equal those of transformers for the same file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.build_model import read_config
from headrace_worker.model.facts import read_facts
from headrace_worker.model.gguf import GgufWeights
from headrace_worker.model.gguf_config import gguf_config
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_tokenizer import byte_tokenizer, gguf_tokenizer
from headrace_worker.model.load import load
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from support.worker.tiny_models import replica_config

CORPUS = [
    "What is the capital of France?",
    "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    "  leading, doubled  and trailing   ",
    "tabs\tand\nnewlines\r\n\r\n\tmixed \n x",
    "Numbers: 3.14159, 1,000,000 and  42  or x1y22z333.",
    "don't can't I'll we've it's DON'T",
    "Grüße aus Köln — «naïve» café, ½ of ™ and … ellipsis",
    "日本語のテキスト、中文文本。한국어 문장",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 ❤️ and zero\u200bwidth",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # ok\n",
    "\x00\x01 control \x7f",
    "<|endoftext|><|im_start|>a<|im_end|> b <repo_name>x<file_sep>",
    "https://example.org/path?q=1&r=%20#frag e-mail@host.tld",
    "",
    " ",
    "aAbBcC" * 50,
]


@pytest.fixture(scope="module")
def embedded() -> GgufFile:
    return GgufFile(resolve("smollm2").path)


def write_llama(path: Path, architecture: str = "llama", tensors_per_part: int = 0, **override: Any) -> Path:
    """A GGUF file of a tiny random llama, in mixed tensor types; or its parts, NAME-00001-of-0000N.gguf beside it."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    for key, value in override.items():
        writer.add_string(key.replace("__", "."), value)
    random = np.random.default_rng(3)
    shapes = {
        "token_embd": (40, 64), "output_norm": (64,), "output": (40, 64),
        "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,), "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = random.normal(0, 0.1, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "attn" in name else gguf.GGMLQuantizationType.F16
        data = gguf.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", data, raw_shape=data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_equal_transformers(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", tokenizer__ggml__model="none")
    file = GgufFile(path)
    assert gguf_config(file)["tie_word_embeddings"] is False
    fields = gguf_config(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    weights = GgufWeights(file)
    assert set(weights) == set(expected)
    for name in weights:
        torch.testing.assert_close(weights.read(name), expected[name], rtol=0, atol=0, msg=name)


def test_values_are_made_of_codes_in_the_dtype_of_the_model(embedded: GgufFile) -> None:
    """As for a GPU: the bits of dequantizing on the host, in parts and with rows in another order, too."""
    model = load(replica_config("smollm2", dtype="bfloat16"), plan=SurgeryPlan.none()).module
    weights = GgufWeights(embedded)
    assert {name for name in weights if weights.read_codes(name) is not None} > {"model.embed_tokens.weight"}
    for name in weights:
        if "embed" in name or ".layers.0." in name:
            assert torch.equal(model.get_parameter(name), weights.read(name).bfloat16()), name


def test_parts_are_read_as_the_whole_file(tmp_path: Path) -> None:
    whole = GgufFile(write_llama(tmp_path / "m.gguf", tokenizer__ggml__model="none"))
    write_llama(tmp_path / "m.gguf", tensors_per_part=5, tokenizer__ggml__model="none")
    parts = [tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    split = GgufFile(parts[0])
    assert [len(part.tensors) for part in split.parts] == [5, 5, 2]
    assert gguf_config(split) == gguf_config(whole)
    expected, found = GgufWeights(whole), GgufWeights(split)
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found.read(name), expected.read(name), rtol=0, atol=0, msg=name)
    assert found.read_bytes == expected.read_bytes
    content = [part.read_bytes() for part in parts]
    parts[1].write_bytes(content[2])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf is part 3 of 3 by its header, not part 2"):
        GgufFile(parts[0])
    parts[1].write_bytes(content[1][:-40])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf is cut short"):
        GgufWeights(GgufFile(parts[0]))
    parts[1].write_bytes(content[1].replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelLoadError, match=r"have the same tensor|occurs twice"):
        GgufFile(parts[0])
    for name in ("first.gguf", "n-00001-of-00001.gguf"):
        renamed = tmp_path / name
        renamed.write_bytes(content[0])
        with pytest.raises(ModelLoadError, match=rf"{name} is part 1 of 3 of a split GGUF model by its header: all"):
            GgufFile(renamed)


def test_config_of_the_embedded_model(embedded: GgufFile) -> None:
    config = gguf_config(embedded)
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is True
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_tokenizer_equals_transformers(embedded: GgufFile) -> None:
    path = resolve("smollm2").path
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = Tokenizer.from_str(gguf_tokenizer(embedded.metadata).to_str())  # as a router receives it
    for text in CORPUS:
        ids = oracle(text)["input_ids"]
        assert found.encode(text).ids == ids, text
        assert found.decode(ids, skip_special_tokens=True) == oracle.decode(ids, skip_special_tokens=True)
        assert found.decode(ids, skip_special_tokens=False) == oracle.decode(ids, skip_special_tokens=False)


def test_facts_of_the_embedded_model(embedded: GgufFile) -> None:
    source = resolve("smollm2")
    facts = read_facts(source, read_config(source, embedded), embedded, vocab_size=49152)
    assert facts.eos_token_ids == (2,) and facts.bos_token_id == 1 and not facts.add_bos
    assert facts.special_tokens["bos_token"] == "<|im_start|>" and facts.special_tokens["eos_token"] == "<|im_end|>"
    assert (facts.max_positions, facts.vocab_size) == (8192, 49152)
    assert "<|im_start|>" in facts.chat_template
    tokenizer = Tokenizer.from_str(facts.tokenizer_json.decode())
    assert tokenizer.encode("<|im_start|>Hi").ids[0] == 1


def test_unknown_kinds_are_refused_by_name(tmp_path: Path, embedded: GgufFile) -> None:
    with pytest.raises(ModelUnsupportedError, match="'mamba' is not read directly"):
        gguf_config(GgufFile(write_llama(tmp_path / "m.gguf", "mamba")))
    yarn = write_llama(tmp_path / "y.gguf", llama__rope__scaling__type="yarn")
    with pytest.raises(ModelUnsupportedError, match="rope scaling 'yarn'"):
        gguf_config(GgufFile(yarn))
    with pytest.raises(ModelUnsupportedError, match="pre-tokenizer 'klingon'"):
        gguf_tokenizer(embedded.metadata | {"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(ModelUnsupportedError, match="tokenizer 'rwkv'"):
        gguf_tokenizer(embedded.metadata | {"tokenizer.ggml.model": "rwkv"})


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(300).to_str())
    for text in CORPUS:
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
