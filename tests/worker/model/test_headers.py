"""Headers of a model's files, read without torch: damage is a clear error."""

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace_base.errors import HeadraceError, ModelUnsupportedError
from headrace_worker.model.facts import max_positions
from headrace_worker.model.headers import check_options, read_headers
from headrace_worker.model.source import resolve
from support.worker.tiny_models import replica_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of two files, made without torch; only its headers are valid."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (made / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((8, 4), np.float32), "b": np.zeros(3, np.float16)}, made / "one.safetensors")
    save_file({"c": np.zeros((2, 2), np.float32), "count": np.zeros(9, np.int64)}, made / "two.safetensors")
    return made


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A GGUF file of a tiny llama with a tokenizer."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(40)])
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["t 1", "t 2"])
    for name, shape in {"token_embd": (40, 64), "output_norm": (64,), "blk.0.attn_q": (64, 64)}.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(HeadraceError) as caught:
        read_headers(resolve(str(path)))
    return str(caught.value)


def test_reading_headers_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from headrace_worker.model.headers import read_headers;"
        "from headrace_worker.model.source import resolve;"
        f"print(read_headers(resolve({str(folder)!r})).elements, read_headers(resolve('smollm2')).elements);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"{8 * 4 + 3 + 4} 134515008", "[]"]


def test_a_safetensors_file_cut_anywhere_is_named(folder: Path) -> None:
    file = folder / "two.safetensors"
    whole = file.read_bytes()
    for length in (0, 3, 8, 9, 50, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        sentence = refusal(folder)
        assert sentence.startswith("two.safetensors is not a complete") and "download it again" in sentence, length
        assert f"{length} bytes" in sentence
    file.write_bytes(whole + b"x")
    assert "not a complete" in refusal(folder)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(folder)


def test_a_gguf_file_cut_anywhere_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    whole = gguf_path.read_bytes()
    assert read_headers(resolve(str(gguf_path))).elements == 40 * 64 + 64 + 64 * 64
    cut = tmp_path / "cut.gguf"
    for length in [4, 23, 24, *range(30, len(whole), 997), len(whole) - 16_000, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        assert "cut.gguf" in refusal(cut), length
    sentence = refusal(cut)
    assert "cut short" in sentence and f"the file has {len(whole) - 64:,}" in sentence


def test_an_unsupported_quantization_is_named(gguf_path: Path) -> None:
    headers = gguf_path.read_bytes()
    place = headers.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    for kind in (26, 4096):  # int32, and an unknown type
        gguf_path.write_bytes(headers[:place] + struct.pack("<I", kind) + headers[place + 4 :])
        with pytest.raises(ModelUnsupportedError, match=rf"blk\.0\.attn_q\.weight .* \(type {kind}\)"):
            read_headers(resolve(str(gguf_path)))


def test_a_length_beyond_the_model_is_refused_where_the_config_has_one(folder: Path) -> None:
    headers = read_headers(resolve(str(folder)))
    check_options(replica_config(folder, max_model_len=64), headers)
    with pytest.raises(ModelUnsupportedError, match="--max-model-len 65 is beyond the 64 positions"):
        check_options(replica_config(folder, max_model_len=65), headers)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    check_options(replica_config(folder, max_model_len=65), read_headers(resolve(str(folder))))


def test_transformers_keeps_the_positions_that_a_config_names() -> None:
    """`check_options` reads them from config.json directly: no family may extend them."""
    kept: list[str] = []
    extended: list[str] = []
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class.from_dict({"max_position_embeddings": 4321})
        except Exception:  # a family that needs more fields than these
            continue
        (extended if max_positions(config) > 4321 else kept).append(config_class.model_type)
    assert not extended and len(kept) > 80
