"""How close a served model is to a reference: the next-token distributions of both over a text.

    served: an engine with every change from outside (packed codes, own kernels) ─┐
                                                                                  ├─▶ distance per position
    reference: plain transformers with dense weights, of the same files or others ┘

The engine is gone before a reference is loaded; its logits stay: 4 bytes for each position and token of the vocabulary.
"""

import gc
import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import headrace_kernels.ops as ops
from headrace_base.errors import MemoryTooSmallError, ModelUnsupportedError, size_text
from headrace_kernels.kv_format import FORMATS
from headrace_kernels.reference.cache import quantize
from headrace_worker.assembly.assemble import Assembly, assemble
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.progress import Progress, ignore_progress
from headrace_worker.device.choice import open_device
from headrace_worker.device.dtypes import ELEMENT_BYTES, dtype_name
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.model import buffers
from headrace_worker.model.headers import read_headers
from headrace_worker.model.load import LoadedModel, load
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.offline import OfflineEngine, Prompt

WINDOW = 512  # tokens of a sequence
_POSITIONS = 64  # compared at once
_NAMED = 3  # matrices that are too far from the original's
_APART = 0.5  # share of a matrix' size by which it may differ from the original; rounding to 4 bits costs 0.1 to 0.2


class Bound(NamedTuple):
    """What an execution may differ by from the same stored values, dequantized."""

    divergence: float  # mean, nats
    same: float  # share of positions with the same first choice


EXACT = Bound(1e-6, 0.999)  # float32
ROUNDED = Bound(1e-3, 0.985)  # inputs in bfloat16
EIGHT_BITS = Bound(1e-3, 0.98)  # inputs of both rounded to 8 bits
# Keys and values of both rounded to 8 bits: weights that differ by 1e-7 give other roundings, and in SmolLM2 a mean KL
# of 0.0027, where rounding itself costs 0.007.
EIGHT_BITS_CACHED = Bound(1e-2, 0.95)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy over all positions of a text whose next token is known."""

    positions: int
    divergence: float  # mean of KL(reference ‖ served), nats
    divergence_p99: float
    same: float  # share of positions with the same most probable token
    likelihood: float  # mean log-probability of the text's tokens: served less reference

    def is_within(self, bound: Bound) -> bool:
        return self.divergence <= bound.divergence and self.same >= bound.same


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found."""

    execution: str  # device and dtype of the served model
    bound: Bound
    dense: Accuracy  # against the same files, dequantized
    original: Accuracy | None = None  # against another checkpoint
    apart: tuple[tuple[str, float], ...] = ()  # matrices that are too far from the original's, and how far

    @property
    def is_right(self) -> bool:
        return self.dense.is_within(self.bound) and not self.apart


def check(
    config: ReplicaConfig, text: str, tokens: int, original: str | None = None, report: Progress = ignore_progress
) -> Report:
    """Compares a model of one rank, as it is served, with its own files, and with the checkpoint `original`.

    Of the text the first `tokens` are computed. Raises a HeadraceError.
    """
    device = open_device(config.device)
    _check_memory(config, device, original)
    assembly = assemble(config, report, device=device)
    loaded = assembly.model
    execution = f"{loaded.device.torch_device.type} in {loaded.dtype_name}"
    rounded = loaded.rounded
    exact = loaded.dtype is torch.float32 and config.cpu_arithmetic == "exact"
    kv_format = loaded.layout.kv_format
    bound = EIGHT_BITS if rounded else EXACT if exact else ROUNDED
    bound = EIGHT_BITS_CACHED if kv_format else bound
    execution += (", inputs in 8 bits" if rounded else "") + (f", keys and values in {kv_format}" if kv_format else "")
    encoded = Tokenizer.from_str(loaded.facts.tokenizer_json.decode()).encode(text).ids
    sequences = windows(encoded, tokens, assembly.max_model_len - 1)
    logits = served(assembly, sequences, report)
    del assembly, loaded
    gc.collect()  # an engine is part of cycles, and its cache may have most of a GPU's memory
    plain = dense(config, report)
    found = compare(logits, plain, sequences, report, rounded, kv_format)
    if original is None:
        return Report(execution, bound, found)
    other = dense(replaced(config, source=original, revision=None, quantization=None), report)
    distances = matrix_distances(plain, other)
    if not distances:
        raise ModelUnsupportedError(
            f"{original} has no matrix with the name and shape of one of this model: give the checkpoint that it was "
            "made from."
        )
    apart = tuple(each for each in distances if not each[1] <= _APART)[:_NAMED]
    del plain
    return Report(execution, bound, found, compare(logits, other, sequences, report), apart)


def _check_memory(config: ReplicaConfig, device: RankDevice, original: str | None) -> None:
    """Raises MemoryTooSmallError where the references, which have all of their values, do not fit."""
    size = ELEMENT_BYTES[dtype_name(config.dtype, device.torch_device.type, config.deterministic)]
    sources = [resolve(config.source, config.load_format, config.revision)]
    sources += [] if original is None else [resolve(original, config.load_format)]
    needed = size * sum(read_headers(source, trust_remote_code=config.trust_remote_code).elements for source in sources)
    if needed > (free := device.free_memory()):
        both = " and the original" if original is not None else ""
        raise MemoryTooSmallError(
            f"The model is compared with all of its values, dequantized{both}: {size_text(needed)}, and "
            f"{size_text(free)} are free. Check it on a machine with more memory, or a smaller model of the family."
        )


def windows(ids: Sequence[int], tokens: int, limit: int) -> list[list[int]]:
    """The first `tokens` ids in sequences of at most WINDOW, and of `limit`. Raises ModelUnsupportedError."""
    ids, length = ids[:tokens], min(WINDOW, limit)
    found = [list(ids[start : start + length]) for start in range(0, len(ids), length)]
    found = [window for window in found if len(window) > 1]
    if not found:
        raise ModelUnsupportedError("The text has fewer than two tokens: give a longer one with --text.")
    return found


def served(assembly: Assembly, sequences: Sequence[Sequence[int]], report: Progress = ignore_progress) -> Tensor:
    """Logits [P, V] in float32, on the host, of each position but a sequence's last."""
    found: list[Tensor] = []
    assembly.runner.on_scored = lambda logits: found.append(logits.to("cpu", torch.float32, copy=True))
    engine = OfflineEngine(assembly)
    sampling = RowSampling(temperature=0.0, prompt_logprobs=0)
    for number, sequence in enumerate(sequences):
        report("computing the text as it is served", number / len(sequences))
        [done] = engine.generate([Prompt(sequence, 1, sampling, ignore_eos=True)])
        if done.error:
            raise ModelUnsupportedError(f"The text could not be computed: {done.error}")
    return torch.cat(found)


def plain_model(loaded: LoadedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Plain transformers with the weights of a model that was loaded with `SurgeryPlan.none()`; they are shared."""
    with torch.device("meta"):
        config = deepcopy(loaded.config)
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    place = loaded.device.torch_device
    buffers.compute_buffers(plain, place)
    weights = {name: tensor.to(dtype) for name, tensor in loaded.module.state_dict().items()}
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    plain.config.use_cache = False
    return plain.eval()


def dense(config: ReplicaConfig, report: Progress = ignore_progress) -> LoadedModel:
    """The checkpoint without any change from outside, its matrices dequantized."""
    return load(replaced(config, cpu_arithmetic="exact"), report, plan=SurgeryPlan.none())


@torch.inference_mode()
def compare(
    logits: Tensor,
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    report: Progress = ignore_progress,
    rounded: Mapping[str, bool] | None = None,
    kv_format: str = "",
) -> Accuracy:
    """logits: see `served`. model: see `dense`. rounded: its linears whose inputs are rounded to 8 bits, see
    `LoadedModel`; kv_format: of its keys and values, see `CacheLayout`. Raises ModelUnsupportedError for another
    vocabulary.
    """
    if model.vocab_size != logits.shape[1]:
        raise ModelUnsupportedError(
            f"The reference has {model.vocab_size:,} tokens, the model {logits.shape[1]:,}: give one with the same "
            "tokenizer."
        )
    plain = plain_model(model, model.dtype)
    for name, groups in (rounded or {}).items():
        plain.get_submodule(name).register_forward_pre_hook(partial(_round_inputs, groups=groups))
    divergences: list[Tensor] = []
    same, likelihood = 0, 0.0
    counts = [len(sequence) - 1 for sequence in sequences]
    for number, (sequence, mine) in enumerate(zip(sequences, torch.split(logits, counts), strict=True)):
        report("computing the text by the reference", number / len(sequences))
        ids = torch.tensor([sequence], device=model.device.torch_device)
        cache = cache_arguments(plain, RoundedCache(plain.config, kv_format)) if kv_format else {"use_cache": False}
        other = plain(input_ids=ids, **cache).logits[0, :-1].cpu()
        for start in range(0, len(other), _POSITIONS):
            at = slice(start, start + _POSITIONS)
            ours, theirs = mine[at].double().log_softmax(-1), other[at].double().log_softmax(-1)
            following = ids[0, 1:, None].cpu()[at]
            divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            likelihood += float((ours - theirs).gather(1, following).sum())
    every, count = torch.cat(divergences).clamp(min=0), sum(counts)
    return Accuracy(count, float(every.mean()), float(every.quantile(0.99)), same / count, likelihood / count)


class RoundedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """What transformers' attention computes with, rounded to 8 bits."""

    def __init__(self, config: Any, name: str) -> None:
        """name: of `kv_format.FORMATS`."""
        super().__init__(config=config)
        self._dtype = FORMATS[name]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states [1, K, T, D]."""
        rounded = []
        for states in (key_states, value_states):
            numbers, scale = quantize(states, self._dtype)
            rounded.append((numbers.float() * scale[..., None]).to(states.dtype))
        found: tuple[Tensor, Tensor] = super().update(*rounded, *args, **kwargs)
        return found


def cache_arguments(plain: PreTrainedModel, cache: RoundedCache) -> dict[str, Any]:
    """What gives a model of transformers its cache: the name differs by version."""
    known = inspect.signature(type(plain).forward).parameters
    return {"use_cache": True, "cache" if "cache" in known else "past_key_values": cache}


def _round_inputs(_module: nn.Module, inputs: tuple[Tensor, ...], groups: bool) -> tuple[Tensor, ...]:
    return (ops.round_rows(inputs[0], groups).float().to(inputs[0].dtype), *inputs[1:])


def matrix_distances(model: LoadedModel, original: LoadedModel) -> list[tuple[str, float]]:
    """‖difference‖ / ‖original‖ of each matrix that both models have, the largest first."""
    others = original.module.state_dict()
    found: list[tuple[str, float]] = []
    for name, tensor in model.module.state_dict().items():
        other: Any = others.get(name)
        if other is not None and other.shape == tensor.shape and tensor.dim() >= 2:
            size, difference = float(other.float().norm()), float((tensor.float() - other.float()).norm())
            found.append((name, difference / size if size else inf if difference else 0.0))
    return sorted(found, key=lambda each: -each[1])
