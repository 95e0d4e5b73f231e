"""Model files of any content: read, or refused by a named error, in memory of a small multiple of their size."""

import json
import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace_proto.errors import HeadraceError, ModelLoadError, ModelUnsupportedError
from headrace_worker.model.build import build_meta, check_rope, read_config
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.facts import read_facts
from headrace_worker.model.gguf import GgufWeights
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_tokenizer import byte_tokenizer, gguf_tokenizer
from headrace_worker.model.headers import read_headers
from headrace_worker.model.source import resolve

fuzz = settings(max_examples=60, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
U64 = st.integers(0, 2**64 - 1)
EDGES = st.sampled_from([0, 1, 2, 4, 8, 9, 31, 2**16, 2**24, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@contextmanager
def bounded_memory(read: int) -> Iterator[None]:
    """Fails when Python allocates more than 16 MiB and 10 times the bytes read inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < (16 << 20) + 10 * read
    finally:
        tracemalloc.stop()


def read_or_refuse(path: Path, read: Callable[[], object]) -> str:
    """The refusal's sentence, or nothing; any other error fails."""
    total = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    with bounded_memory(total):
        try:
            read()
        except HeadraceError as error:
            sentence = str(error)
            assert len(sentence) < 2000 and sentence.encode(), "a sentence that can be sent"
            return sentence
    return ""


def read_gguf(path: Path) -> None:
    """All that is read of a GGUF file's header, and every tensor."""
    source = resolve(str(path))
    read_headers(source)
    file = GgufFile(path)
    config = read_config(source, file)
    check_rope(config, None)
    cache_layout(config, 16, 4)
    weights = GgufWeights(file)
    for name in weights:
        weights.read(name)
    weights.rope_factors()
    read_facts(source, config, file, vocab_size=config.vocab_size)


# GGUF


def gguf_string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf_value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return gguf_string(value)
    if kind == 9:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(gguf_value(element, entry) for entry in values)
    return struct.pack("<" + SCALARS[kind], value)


def gguf_bytes(
    pairs: list[tuple[bytes, int, Any]], tensors: list[tuple[bytes, tuple[int, ...], int, int]], data: bytes
) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, kind, value in pairs:
        out += gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value)
    for name, dims, kind, offset in tensors:
        out += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % 32) + data


SIZES = {
    "block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip
PAIRS: list[tuple[bytes, int, Any]] = [
    (b"general.architecture", 8, b"llama"),
    *((f"llama.{name}".encode(), 4, value) for name, value in SIZES.items()),
    (b"llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
    (b"tokenizer.ggml.model", 8, b"gpt2"),
    (b"tokenizer.ggml.tokens", 9, (8, [chr(ord("a") + i).encode() for i in range(20)] + [b"ab"])),
    (b"tokenizer.ggml.merges", 9, (8, [b"a b"])),
    (b"tokenizer.ggml.token_type", 9, (5, [1] * 20 + [3])),
    (b"tokenizer.ggml.eos_token_id", 4, 2),
]
TENSORS = [(b"token_embd.weight", (64, 21), 0, 0), (b"output_norm.weight", (64,), 0, 21 * 256)]
DATA = bytes(22 * 256)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refusal(tmp_path: Path, content: bytes) -> str:
    path = write(tmp_path / "model.gguf", content)
    return read_or_refuse(path, lambda: read_gguf(path))


def test_the_file_that_is_damaged_here_is_valid(tmp_path: Path) -> None:
    assert refusal(tmp_path, gguf_bytes(PAIRS, TENSORS, DATA)) == ""


def replaced(key: str, kind: int, value: Any) -> list[tuple[bytes, int, Any]]:
    rest = [pair for pair in PAIRS if pair[0] != key.encode()]
    return [*rest, (key.encode(), kind, value)]


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        (PAIRS + PAIRS[-1:], "'tokenizer.ggml.eos_token_id' occurs twice"),
        (replaced("general.alignment", 8, b"32"), "alignment is 32"),
        (replaced("general.alignment", 7, True), "alignment is True"),
        (replaced("general.alignment", 4, 0), "alignment is 0"),
        (replaced("general.alignment", 10, 2**63), "alignment is 9223372036854775808"),
        (replaced("general.architecture", 4, 3), "'general.architecture' is not a string"),
        (replaced("llama.block_count", 9, (4, [1, 1])), "'llama.block_count' is not one number"),
        (replaced("llama.block_count", 9, (4, [1])), "'llama.block_count' is not one number"),
        (replaced("llama.block_count", 10, 2**40), "num_hidden_layers of this llama model is 1099511627776"),
        (replaced("llama.attention.head_count", 4, 0), "is invalid"),
        (replaced("llama.attention.head_count_kv", 9, (4, [2])), "is not one number"),
        (replaced("llama.attention.key_length", 4, 15), "is invalid"),
        (replaced("llama.attention.layer_norm_rms_epsilon", 6, float("nan")), "is not one finite number"),
        (replaced("llama.rope.freq_base", 6, float("inf")), "is not one finite number"),
        (replaced("tokenizer.ggml.pre", 9, (8, [b"gpt-2"])), "'tokenizer.ggml.pre' is not a string"),
        (replaced("tokenizer.ggml.model", 9, (8, [])), "'tokenizer.ggml.model' is not a string"),
        (replaced("tokenizer.ggml.tokens", 9, (4, [1, 2])), "is not a list of strings"),
        (replaced("tokenizer.ggml.tokens", 8, b"abc"), "is not a list of strings"),
        (replaced("tokenizer.ggml.merges", 9, (8, [b"a"])), "tokenizer is damaged"),
        (replaced("tokenizer.ggml.merges", 9, (8, [b"a z"])), "tokenizer is damaged"),
        (replaced("tokenizer.ggml.token_type", 8, b"123"), "is not a list of numbers"),
        (replaced("tokenizer.ggml.eos_token_id", 8, b"2"), "'tokenizer.ggml.eos_token_id' is not one number"),
        (replaced("tokenizer.ggml.eos_token_id", 5, -2), "'-2' is given as the id of an end token"),
        (replaced("tokenizer.ggml.add_bos_token", 4, 1), "is not true or false"),
        (replaced("tokenizer.chat_template", 4, 1), "'tokenizer.chat_template' is not a string"),
        (replaced("k" * 2000, 4, 1), "a name has 2000 bytes"),
    ],
)
def test_damaged_metadata_is_named(tmp_path: Path, pairs: list[tuple[bytes, int, Any]], sentence: str) -> None:
    assert sentence in refusal(tmp_path, gguf_bytes(pairs, TENSORS, DATA))


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.attention.causal", 7, False),
        ("llama.attention.sliding_window", 4, 4096),
        ("llama.attention.value_length", 4, 32),
        ("llama.rope.dimension_count", 4, 8),
        ("llama.expert_count", 4, 8),
        ("llama.attention.max_alibi_bias", 6, 8.0),
        ("llama.logit_scale", 6, 2.0),
    ],
)
def test_keys_with_which_the_model_computes_otherwise_are_refused(
    tmp_path: Path, key: str, kind: int, value: Any
) -> None:
    path = write(tmp_path / "model.gguf", gguf_bytes(replaced(key, kind, value), TENSORS, DATA))
    with pytest.raises(ModelUnsupportedError, match=r"is not supported|are not supported"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.attention.causal", 7, True),
        ("llama.attention.sliding_window", 4, 0),
        ("llama.attention.value_length", 4, 16),
        ("llama.rope.dimension_count", 4, 16),
        ("llama.vocab_size", 4, 21),
        ("general.author", 8, b"somebody"),
        ("another.tool.version", 4, 1),
    ],
)
def test_keys_without_effect_are_accepted(tmp_path: Path, key: str, kind: int, value: Any) -> None:
    assert refusal(tmp_path, gguf_bytes(replaced(key, kind, value), TENSORS, DATA)) == ""


NAME = b"output_norm.weight"


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([*TENSORS, TENSORS[0]], "'token_embd.weight' occurs twice"),
        ([TENSORS[0], (NAME, (0,), 0, 21 * 256)], "has no elements"),
        ([TENSORS[0], (NAME, (), 0, 21 * 256)], "has no elements"),
        ([TENSORS[0], (NAME, (64, 1, 1, 1, 1), 0, 21 * 256)], "5 dimensions"),
        ([TENSORS[0], (NAME, (2**63,), 0, 21 * 256)], "cut short"),
        ([TENSORS[0], (NAME, (2**63, 2**63), 0, 21 * 256)], "cut short"),
        ([TENSORS[0], (NAME, (64,), 0, 2**64 - 32)], "cut short"),
        ([TENSORS[0], (NAME, (64,), 0, 21 * 256 + 8)], "is not at a multiple of 32"),
        ([TENSORS[0], (NAME, (64,), 0, 256)], "begins inside another tensor"),
        ([TENSORS[0], (NAME, (63,), 8, 21 * 256)], "has the shape"),
        ([TENSORS[0], (NAME, (64,), 4000, 21 * 256)], "unsupported quantization"),
        ([TENSORS[0], (NAME, (64,), 4, 21 * 256)], "unsupported quantization"),
        ([*TENSORS, (b"rope_freqs.weight", (4,), 0, 22 * 256)], "rope_freqs.weight of the GGUF file does not fit"),
        ([(b"x" * 1100, (64,), 0, 0)], "a name has 1100 bytes"),
        ([TENSORS[1]], "lacks 'token_embd.weight'"),
        ([*TENSORS, (b"blk.0.attn_rot.weight", (8,), 0, 22 * 256)], "'blk.0.attn_rot.weight' is unknown"),
    ],
)
def test_damaged_directories_are_named(
    tmp_path: Path, tensors: list[tuple[bytes, tuple[int, ...], int, int]], sentence: str
) -> None:
    assert sentence in refusal(tmp_path, gguf_bytes(PAIRS, tensors, DATA + bytes(256)))


def test_large_arrays_take_little_more_memory_than_their_file(tmp_path: Path) -> None:
    count = 4 << 20
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string(b"k")
    for element, size in ((0, 1), (7, 1), (5, 4), (6, 4), (10, 8)):
        path = write(tmp_path / "model.gguf", head + struct.pack("<IIQ", 9, element, count) + bytes(count * size))
        tracemalloc.start()
        try:
            GgufFile(path)
            assert tracemalloc.get_traced_memory()[1] < 3 * count * size
        finally:
            tracemalloc.stop()


names = st.one_of(st.sampled_from([pair[0] for pair in PAIRS]), st.binary(max_size=12))


@st.composite
def any_value(draw: st.DrawFn, nested: bool = True) -> tuple[int, Any]:
    kind = draw(st.sampled_from([*SCALARS, 8, *([9] if nested else [])]))
    if kind == 8:
        return kind, draw(st.binary(max_size=20))
    if kind == 9:
        element = draw(st.sampled_from([*SCALARS, 8]))
        values = st.binary(max_size=5) if element == 8 else scalar(element)
        return kind, (element, draw(st.lists(values, max_size=6)))
    return kind, draw(scalar(kind))


def scalar(kind: int) -> st.SearchStrategy[Any]:
    code = SCALARS[kind]
    if code in "fd":
        return st.floats(width=32 if code == "f" else 64)
    if code == "?":
        return st.booleans()
    bits = 8 * struct.calcsize(code)
    low, high = (0, 2**bits - 1) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.one_of(st.integers(low, high), st.sampled_from([low, 0, 1, high]))


@fuzz
@given(st.lists(st.tuples(names, any_value()), max_size=3), st.data())
def test_any_metadata_and_directory(tmp_path: Path, changes: list[tuple[bytes, tuple[int, Any]]], data: Any) -> None:
    pairs = list(PAIRS)
    for key, (kind, value) in changes:
        pairs = [pair for pair in pairs if pair[0] != key or data.draw(st.booleans())] + [(key, kind, value)]
    tensors = list(TENSORS)
    if data.draw(st.booleans()):
        dims = tuple(data.draw(st.lists(st.one_of(EDGES, U64), max_size=5)))
        tensors[data.draw(st.integers(0, 1))] = (NAME, dims, data.draw(st.integers(0, 40)), data.draw(EDGES))
    refusal(tmp_path, gguf_bytes(pairs, tensors, DATA))


@fuzz
@given(st.lists(st.tuples(st.integers(4, 700), st.binary(min_size=1, max_size=9)), max_size=4), st.integers(0, 12_000))
def test_any_damage_and_any_length(tmp_path: Path, damage: list[tuple[int, bytes]], length: int) -> None:
    content = bytearray(gguf_bytes(PAIRS, TENSORS, DATA))
    for place, new in damage:
        content[place : place + len(new)] = new
    refusal(tmp_path, bytes(content[:length] if length < 6000 else content))


@fuzz
@given(st.binary(max_size=300))
@example(b"")
def test_any_bytes_after_the_magic(tmp_path: Path, content: bytes) -> None:
    refusal(tmp_path, b"GGUF" + struct.pack("<I", 3) + content)


tokens = st.lists(st.text(max_size=4), max_size=12)


@fuzz
@given(tokens, st.lists(st.text("abcĠ ", max_size=4), max_size=6), st.lists(st.integers(-1, 9), max_size=12))
def test_any_gguf_tokenizer(vocabulary: list[str], merges: list[str], types: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
    }  # fmt: skip
    try:
        gguf_tokenizer(metadata).encode("abc a")
    except HeadraceError:
        return


# JSON and safetensors


json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
        st.sampled_from([10**30, -1, 0, 2**31, 1e308, math.nan, math.inf, "\ud800", "x" * 5000]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 64, "rope_theta": 1e4, "head_dim": 16,
}  # fmt: skip
KEYS = [
    *CONFIG, "rope_parameters", "rope_scaling", "layer_types", "sliding_window", "eos_token_id", "bos_token_id",
    "quantization_config", "is_causal", "use_bidirectional_attention", "torch_dtype", "dtype", "architectures",
    "auto_map", "tie_word_embeddings", "hidden_act", "rms_norm_eps", "attention_bias", "is_encoder_decoder",
    "text_config", "transformers_version", "attn_implementation", "_attn_implementation", "pad_token_id",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with only a config and a tokenizer."""
    made = tmp_path_factory.mktemp("config")
    tokenizer = byte_tokenizer(300)
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def read_folder(path: Path) -> None:
    source = resolve(str(path), "dummy")
    config = read_config(source, None)
    check_rope(config, None)
    model = build_meta(config, torch.float32)
    cache_layout(model.config, 16, 4)
    read_facts(source, model.config, None, vocab_size=300)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@fuzz
@given(st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=3))
@example({"hidden_size": "x"})
@example({"num_hidden_layers": 10**9})
@example({"num_attention_heads": math.nan})
@example({"rope_parameters": {"rope_type": []}})
@example({"layer_types": [math.inf]})
@example({"quantization_config": 3})
def test_any_value_in_a_config(folder: Path, fields: dict[str, Any]) -> None:
    write_json(folder / "config.json", CONFIG | fields)
    (folder / "generation_config.json").unlink(missing_ok=True)
    try:
        read_folder(folder)
    except HeadraceError:
        return


@pytest.mark.parametrize("depth", [100, 400, 900, 100_000])
def test_deeply_nested_configs_are_refused_or_read(folder: Path, depth: int) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG)[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}")
    read_or_refuse(folder, lambda: read_folder(folder))


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(["do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "eos_token_id"]),
        json_values,
        max_size=4,
    )
)
@example({"eos_token_id": [1, "2"]})
@example({"max_new_tokens": math.inf})
@example({"do_sample": True, "top_k": math.nan})
def test_any_generation_config(folder: Path, fields: dict[str, Any]) -> None:
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", fields)
    try:
        read_folder(folder)
    except HeadraceError:
        return


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    write_json(made / "config.json", CONFIG)
    (made / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((8, 4), np.float32)}, made / "one.safetensors")
    return made


INDEX = "model.safetensors.index.json"


@fuzz
@given(st.one_of(json_values, st.fixed_dictionaries({"weight_map": json_values})))
@example({"weight_map": {"a": "x" * 5000}})
@example({"weight_map": {"a": ""}})
@example({"weight_map": {"a": "\x00"}})
@example({"weight_map": {"a": ".."}})
@example({"weight_map": {"a": {}}})
@example({"weight_map": {"a": "\ud800"}})
def test_any_index(weights: Path, content: Any) -> None:
    write_json(weights / INDEX, content)
    read_or_refuse(weights, lambda: read_headers(resolve(str(weights))))


def test_a_deeply_nested_index_is_refused(weights: Path) -> None:
    (weights / INDEX).write_text('{"weight_map": ' + "[" * 100_000)
    assert "is damaged" in read_or_refuse(weights, lambda: read_headers(resolve(str(weights))))


def test_an_entry_that_is_no_file_is_refused(weights: Path) -> None:
    (weights / "two.safetensors").mkdir()
    assert "'two.safetensors' in" in read_or_refuse(weights, lambda: resolve(str(weights)))


def test_a_tensor_in_two_files_is_refused(weights: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, weights / "two.safetensors")
    with pytest.raises(ModelLoadError, match="have the same tensor, 'a'"):
        read_headers(resolve(str(weights)))


@fuzz
@given(
    st.dictionaries(
        st.text(max_size=6),
        st.one_of(
            json_values,
            st.fixed_dictionaries(
                {
                    "dtype": st.one_of(
                        st.sampled_from(["F32", "F16", "BF16", "I8", "F8_E4M3", "F4", "X"]), json_values
                    ),
                    "shape": st.one_of(st.lists(st.one_of(EDGES, st.integers(-2, 9)), max_size=5), json_values),
                    "data_offsets": st.one_of(st.lists(EDGES, min_size=2, max_size=2), json_values),
                }
            ),
        ),
        max_size=3,
    ),
    st.one_of(st.none(), U64),
    st.integers(0, 64),
)
def test_any_safetensors_header(weights: Path, header: dict[str, Any], length: int | None, data: int) -> None:
    content = json.dumps(header).encode()
    path = weights / "one.safetensors"
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + bytes(data))
    read_or_refuse(weights, lambda: read_headers(resolve(str(weights))))
