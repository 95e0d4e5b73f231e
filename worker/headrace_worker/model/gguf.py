"""A GGUF file as a Hugging Face model: its config, and its tensors under transformers' names.

The tensor names are llama.cpp's (`blk.0.attn_q.weight`); the llama family also stores the rows of q and k in another
order (each head's rotary halves interleaved), which is reversed here. Sources: the GGUF specification and the names
in the `gguf` package.
"""

import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch

from headrace_proto.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.gguf_file import GgufFile, GgufTensor
from headrace_worker.model.sharding.cuts import Cuts, Span, spans_of
from headrace_worker.model.weights import check_name, join

# GGUF architecture -> transformers model_type
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_INTERLEAVED_ROTARY = {"llama"}  # q and k rows are stored permuted
_SPECIAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # divides the rotary frequencies (Llama 3.1 and later); a buffer, not a weight


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The transformers config of a GGUF model, as a dict with `model_type`.

    Raises ModelUnsupportedError for an architecture or rope scaling that is not mapped, ModelLoadError for a missing
    key.
    """
    data = file.metadata
    arch = data.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelUnsupportedError(
            f"GGUF architecture {arch!r} is not read directly ({', '.join(sorted(_ARCHITECTURES))} are): "
            "use the model's safetensors instead."
        )
    scaling = data.get(f"{arch}.rope.scaling.type", "none")
    factor = data.get(f"{arch}.rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear") or (scaling == "none" and factor not in (0.0, 1.0)):
        raise ModelUnsupportedError(f"GGUF rope scaling {scaling!r} is not supported: use the model's safetensors.")
    try:
        heads = data[f"{arch}.attention.head_count"]
        hidden = data[f"{arch}.embedding_length"]
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": data.get(f"{arch}.rope.freq_base", 10000.0)}
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": factor}
        head_dim = data.get(f"{arch}.attention.key_length") or hidden // heads
        if data.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
            raise ModelUnsupportedError("GGUF models with partial rotary embedding are not supported: use safetensors.")
        config: dict[str, Any] = {
            "model_type": _ARCHITECTURES[arch],
            "hidden_size": hidden,
            "intermediate_size": data[f"{arch}.feed_forward_length"],
            "num_hidden_layers": data[f"{arch}.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": data.get(f"{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": data[f"{arch}.context_length"],
            "rms_norm_eps": data[f"{arch}.attention.layer_norm_rms_epsilon"],
            "rope_parameters": rope,
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
        }
    except (TypeError, ZeroDivisionError) as error:
        raise ModelLoadError("The GGUF file's metadata makes no sense: it is damaged or of an unknown kind.") from error
    except KeyError as error:
        raise ModelLoadError(f"The GGUF file lacks {error.args[0]!r}: it is damaged or of an unknown kind.") from error
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = data.get(f"tokenizer.ggml.{key}_token_id")
    config["pad_token_id"] = data.get("tokenizer.ggml.padding_token_id")
    return config


class GgufWeights:
    """Tensors of a GGUF file under transformers' names, dequantized to float32 when read."""

    def __init__(self, file: GgufFile) -> None:
        self.read_bytes = 0
        self._file = file
        self._arch = str(file.metadata["general.architecture"])
        self._by_name: dict[str, GgufTensor] = {}
        for tensor in file.tensors.values():
            if tensor.name != ROPE_FACTORS:
                self._by_name[_transformers_name(tensor.name)] = tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._by_name[name].shape

    def read(self, name: str, cuts: Cuts = ()) -> torch.Tensor:
        check_name(name, self._by_name)
        tensor = self._by_name[name]
        ranges = [spans_of(cuts, dim, size) for dim, size in enumerate(tensor.shape)]
        permuted = self._arch in _INTERLEAVED_ROTARY and (".q_proj." in name or ".k_proj." in name)
        head = self._head_rows(tensor, "q_proj" in name) if permuted else 0
        return join(ranges, lambda spans: self._read_block(tensor, spans, head))

    def _read_block(self, tensor: GgufTensor, spans: tuple[Span, ...], head: int) -> torch.Tensor:
        """One span of each dimension; `head`: rows of a head if they are to be put in transformers' order."""
        values = self._dequantize(tensor, spans)
        if head:
            # From (pair, half) order to (half, pair) order: transformers rotates halves.
            shape = values.shape
            values = values.reshape(shape[0] // head, head // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        # Unquantized tensors are views of the read-only map.
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary inverse frequencies [head_dim / 2], when the file has them."""
        tensor = self._file.tensors.get(ROPE_FACTORS)
        return None if tensor is None else torch.from_numpy(self._dequantize(tensor).copy())

    def _dequantize(self, tensor: GgufTensor, spans: tuple[Span, ...] | None = None) -> np.ndarray:
        """The elements of one span per dimension (all without), from the quantization blocks that hold them."""
        shape = tensor.shape
        spans = spans or tuple((0, size) for size in shape)
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            row_bytes = shape[-1] // block * block_bytes
            count = int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes
            raw = np.frombuffer(self._file.buffer, np.uint8, count, tensor.offset).reshape(*shape[:-1], row_bytes)
            first, stop = spans[-1]
            start = first // block  # quantization blocks run along rows
            columns = slice(start * block_bytes, -(-stop // block) * block_bytes)
            chosen = raw[(*(slice(*span) for span in spans[:-1]), columns)]
            self.read_bytes += chosen.nbytes
            rows = np.ascontiguousarray(chosen).reshape(-1, chosen.shape[-1])
            values = np.asarray(gguf.dequantize(rows, kind), dtype=np.float32)
            values = values[:, first - start * block : stop - start * block]
            return values.reshape([end - begin for begin, end in spans])
        except NotImplementedError as error:
            raise ModelUnsupportedError(
                f"GGUF tensor {tensor.name} has a quantization that is not read: convert it to Q8_0, Q4_1 or F16."
            ) from error
        except ValueError as error:
            raise ModelLoadError(
                f"GGUF tensor {tensor.name} does not fit its file: the file is cut short or damaged; download it again."
            ) from error

    def _head_rows(self, tensor: GgufTensor, query: bool) -> int:
        heads = self._file.metadata[f"{self._arch}.attention.head_count"]
        if not query:
            heads = self._file.metadata.get(f"{self._arch}.attention.head_count_kv", heads)
        return tensor.shape[0] // int(heads)


def _transformers_name(name: str) -> str:
    if name in _SPECIAL_TENSORS:
        return _SPECIAL_TENSORS[name]
    if (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_PARTS:
        return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"
    raise ModelUnsupportedError(f"GGUF tensor {name!r} is of no known kind: use the model's safetensors instead.")
