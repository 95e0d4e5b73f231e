"""Checks of a model's files without torch, within a second: whether each is complete, and the memory of the model.

Each check is the same as in loading, so a model that is refused here would not start.
"""

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.kv.sizing import request_limit
from headrace_worker.model.facts import max_positions
from headrace_worker.model.gguf_config import gguf_config, weight_names
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.gguf_tensors import check_tensors, packed_bytes
from headrace_worker.model.gguf_tokenizer import check_gguf_tokenizer
from headrace_worker.model.json_files import read_object
from headrace_worker.model.quantized.config import check_online, check_stored, read_scheme, with_quantization
from headrace_worker.model.refusals import (
    check_config_file,
    check_equal_sizes,
    check_limits,
    check_recurrent,
    check_rope,
    text_fields,
)
from headrace_worker.model.safetensors_files import TEXT_PARTS, count_elements, open_files
from headrace_worker.model.source import ModelSource
from headrace_worker.model.tokenizer_files import check_tokenizer_file, has_tokenizer


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of one model's files."""

    elements: int  # lower bound of the elements of all ranks of a replica together; 0 for random weights
    config: dict[str, Any]  # the language model's config: config.json or a part of it; for a GGUF file the whole config
    packed_bytes: int = 0  # on a CPU in float32, where matrices stay packed
    rounded_bytes: int = 0  # the same with --cpu-arithmetic bf16
    quantized_by: str | None = None

    def weight_bytes(self, config: ReplicaConfig, element_bytes: int) -> int:
        """The bytes of the weights of all ranks of a replica together; a lower bound."""
        if config.quantization is not None:
            return self.elements
        if config.device == "cpu" and element_bytes == 4:
            return self.rounded_bytes if config.cpu_arithmetic == "bf16" else self.packed_bytes
        return self.elements * element_bytes


def read_headers(source: ModelSource, *, trust_remote_code: bool = False) -> Headers:
    """Raises ModelLoadError or ModelUnsupportedError for files that would not load."""
    return _gguf_headers(source) if source.is_gguf else _folder_headers(source, trust_remote_code)


def check_options(config: ReplicaConfig, headers: Headers) -> None:
    """Raises ModelUnsupportedError for a max_model_len, quantization or format of the cache that the model does not
    support, as far as its files show.
    """
    check_online(config.quantization, headers.quantized_by)
    fields = SimpleNamespace(**{"model_type": ""} | headers.config)
    check_rope(fields, config.max_model_len)
    check_limits(fields, config.max_model_len)
    check_recurrent(fields, config)
    check_equal_sizes(config.kv_cache_dtype == "auto" or not headers.config.get("kv_lora_rank"))
    if "max_position_embeddings" in headers.config:
        request_limit(config.max_model_len, max_positions(SimpleNamespace(**headers.config)))


def _gguf_headers(source: ModelSource) -> Headers:
    file = GgufFile(source.path)
    config = gguf_config(file)
    check_gguf_tokenizer(file.metadata)
    if source.kind == "dummy":
        return Headers(0, config)
    check_tensors(file)
    tensors = [file.tensors[stored] for _, stored in weight_names(file)]
    packed = sum(map(packed_bytes, tensors))
    return Headers(sum(prod(tensor.shape) for tensor in tensors), config, packed, packed, "a GGUF")


def _folder_headers(source: ModelSource, trust_remote_code: bool) -> Headers:
    whole = with_quantization(source.path, read_object(source.path / "config.json", source.name), source.name)
    check_config_file(source.name, whole, trust_remote_code=trust_remote_code)
    config = text_fields(whole)
    if has_tokenizer(source):
        check_tokenizer_file(source)
    layers = config.get("num_hidden_layers")
    handles = open_files(source.weights, "numpy")
    parts = TEXT_PARTS if config is not whole else ()
    scheme = read_scheme(str(config.get("model_type")), whole.get("quantization_config"))
    check_stored(scheme, {name: file.get_slice(name).get_dtype() for name, file in handles.items()})
    bits = scheme.bits if scheme is not None else 8
    found = count_elements(handles, layers if isinstance(layers, int) else None, parts, bits)
    method = None if scheme is None else scheme.method
    return Headers(found.elements, config, found.packed_bytes(), found.packed_bytes(rounded=True), method)
