"""Headers of a model's files, read without torch: every kind of damage is a clear error, and needs little memory."""

import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace_proto.errors import HeadraceError, ModelLoadError, ModelUnsupportedError
from headrace_worker.model.facts import max_positions
from headrace_worker.model.headers import check_length, read_headers
from headrace_worker.model.source import resolve

Replica = Callable[..., Any]


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


@contextmanager
def little_memory(most: int = 16 << 20) -> Iterator[None]:
    """Fails when Python allocates more than `most` bytes at a time inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refusal(path: Path) -> str:
    with little_memory(), pytest.raises(HeadraceError) as caught:
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


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", (1 << 64) - 1) + b"{}",
        struct.pack("<Q", 99_000_000) + b"{" * 100,
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 100_000) + b'{"a":' * 20_000,
        struct.pack("<Q", 69) + b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}'[:69],
        b"<html>404 not found</html>" * 40,
    ],
    ids=["2^60", "2^64", "99 MB", "nested list", "nested object", "huge shape", "a web page"],
)
def test_a_hostile_safetensors_header_is_refused_in_little_memory(folder: Path, content: bytes) -> None:
    (folder / "one.safetensors").write_bytes(content)
    assert "one.safetensors is not a complete safetensors file" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"model_type": ', "config.json of .* is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["llama"]', "is not a JSON object"),
    ],
)
def test_a_damaged_config_is_refused(folder: Path, content: str, sentence: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=sentence):
        read_headers(resolve(str(folder)))


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


def test_damage_to_a_gguf_header_is_a_clear_error_or_changes_nothing_that_is_checked(
    gguf_path: Path, tmp_path: Path
) -> None:
    whole = gguf_path.read_bytes()
    chance = random.Random(11)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4))):
            content[chance.randrange(4, 1800)] = chance.choice((0, 1, 8, 9, 0x7F, 0xFF, chance.randrange(256)))
        damaged.write_bytes(content)
        try:
            with little_memory():
                read_headers(resolve(str(damaged)))
        except HeadraceError:
            refused += 1
    assert refused > 50


def test_counts_of_a_gguf_header_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    key = struct.pack("<Q", 1) + b"k"
    bodies = {
        "declares": (struct.pack("<QQ", 1 << 62, 0), b""),
        "longer than the file": (struct.pack("<QQ", 0, 1), key + struct.pack("<IIQ", 9, 0, 1 << 40)),
        "array of arrays": (struct.pack("<QQ", 0, 1), key + struct.pack("<IIQ", 9, 9, 5) * 5000),
    }
    for words, (counts, body) in bodies.items():
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + counts + body + bytes(4096))
        assert words in refusal(path)


def test_an_unsupported_quantization_is_named(gguf_path: Path) -> None:
    headers = gguf_path.read_bytes()
    place = headers.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    for kind in (26, 4096):  # int32, and an unknown type
        gguf_path.write_bytes(headers[:place] + struct.pack("<I", kind) + headers[place + 4 :])
        with pytest.raises(ModelUnsupportedError, match=rf"blk\.0\.attn_q\.weight .* \(type {kind}\)"):
            read_headers(resolve(str(gguf_path)))


def test_a_length_beyond_the_model_is_refused_where_the_config_has_one(folder: Path, replica: Replica) -> None:
    headers = read_headers(resolve(str(folder)))
    check_length(replica(folder, max_model_len=64), headers)
    with pytest.raises(ModelUnsupportedError, match="--max-model-len 65 is beyond the 64 positions"):
        check_length(replica(folder, max_model_len=65), headers)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    check_length(replica(folder, max_model_len=65), read_headers(resolve(str(folder))))


def test_transformers_keeps_the_positions_that_a_config_names() -> None:
    """`check_length` reads them from config.json directly: no family may extend them."""
    kept: list[str] = []
    extended: list[str] = []
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class.from_dict({"max_position_embeddings": 4321})
        except Exception:  # a family that needs more fields than these
            continue
        (extended if max_positions(config) > 4321 else kept).append(config_class.model_type)
    assert not extended and len(kept) > 80
