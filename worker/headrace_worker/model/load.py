"""Load a model: find its files, build it, fill it with weights, apply changes from outside, collect its facts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from headrace_base.errors import MemoryTooSmallError, ModelUnsupportedError
from headrace_kernels import find_slow_backends
from headrace_kernels.cpu import library
from headrace_kernels.gpu import weight_only
from headrace_kernels.rounded import NO_PRODUCTS, products_of
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.progress import Progress, ignore_progress
from headrace_worker.device.choice import choose_dtype, open_device
from headrace_worker.device.rank_device import RankDevice
from headrace_worker.model import buffers, indexer, latent, recurrent, surgery
from headrace_worker.model.build_model import build_meta, output_rows, read_config
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.converted import converted
from headrace_worker.model.facts import ModelFacts, read_facts
from headrace_worker.model.gguf import GgufWeights
from headrace_worker.model.gguf_file import GgufFile
from headrace_worker.model.packable import is_experts
from headrace_worker.model.quantized.config import QuantizationScheme, check_online, read_scheme
from headrace_worker.model.quantized.online import Quantizer
from headrace_worker.model.quantized.weights import QuantizedWeights
from headrace_worker.model.refusals import check_limits, check_recurrent, check_rope, keeps_states
from headrace_worker.model.sharding.shard import Sharding, shard
from headrace_worker.model.source import ModelSource, resolve
from headrace_worker.model.text_part import TextNames, text_config
from headrace_worker.model.weights import DummyWeights, SafetensorsWeights, Weights, check_filled, fill


@dataclass(slots=True)
class LoadedModel:
    """A model that is ready to run, and its facts."""

    source: ModelSource
    module: PreTrainedModel
    config: Any  # the transformers config
    facts: ModelFacts
    device: RankDevice
    dtype: torch.dtype
    layout: CacheLayout
    parallel: ParallelContext  # the part of the model
    weight_bytes: int
    read_bytes: int  # bytes read from the checkpoint's files
    notes: list[str]
    warnings: list[str]  # what makes it slower, or wrong, for a reason that the user can change; notes of its facts
    rounded: dict[str, bool]  # linears whose inputs are rounded to 8 bits: in groups, or by token
    quantization: str | None = None  # quantization of the model's weights, while they were loaded
    few_bits: bool = False  # a GPU multiplies codes, whose scales are in its dtype
    deterministic: bool = False  # a row's result depends on that row alone, bit for bit

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        """The name of the format or dtype of keys and values."""
        return self.layout.kv_format or self.dtype_name

    @property
    def arithmetic(self) -> str:
        """Models with another one compute other keys and values of the same tokens."""
        online = f"/online-{self.quantization}" if self.quantization else ""
        return self.dtype_name + online + ("/w8a8" if self.rounded else "") + ("/few-bits" if self.few_bits else "")


def load(
    config: ReplicaConfig,
    report: Progress = ignore_progress,
    plan: surgery.SurgeryPlan | None = None,
    parallel: ParallelContext = SINGLE,
    device: RankDevice | None = None,
) -> LoadedModel:
    """Load the model that `config` names onto a device: all of it, or the part of one rank.

    `plan`: the changes from outside to apply (default: all that fit). `device`: of the rank; None: that of `config`.
    Does not communicate with other ranks. Raises ModelSourceError, ModelUnsupportedError,
    ModelLoadError or DeviceError, each with a sentence.
    """
    report("finding the model", 0.0)
    if (config.tp, config.pp) != (parallel.tp.size, parallel.pp_size):
        raise ModelUnsupportedError(
            f"tp {config.tp} × pp {config.pp} needs {config.tp * config.pp} ranks, each in its own process: "
            "`headrace serve` starts them."
        )
    source = resolve(config.source, config.load_format, config.revision)
    device = device or open_device(config.device)
    place = device.torch_device
    dtype = choose_dtype(config.dtype, place.type, config.deterministic)
    gguf = GgufFile(source.path) if source.is_gguf else None
    hf_config = read_config(source, gguf, config.trust_remote_code)
    text = text_config(hf_config)
    check_rope(text, config.max_model_len)
    check_limits(text, config.max_model_len)
    check_recurrent(text, config)
    report("building the model", 0.1)
    model = build_meta(text, dtype, config.trust_remote_code)
    vocab_size = output_rows(model)
    # Tokenizer files are parsed while weights are read.
    with ThreadPoolExecutor(max_workers=1) as pool, torch.no_grad():
        facts_job = pool.submit(
            read_facts, source, model.config, gguf, vocab_size, config.trust_remote_code, config.chat_template
        )
        buffers.compute_buffers(model, place)
        parts = recurrent.state_parts(model) if keeps_states(text) else ()
        scheme = read_scheme(text.model_type, getattr(hf_config, "quantization_config", None))
        check_online(config.quantization, "a GGUF" if gguf is not None else None if scheme is None else scheme.method)
        online = None if config.quantization is None else Quantizer(config.quantization, model)
        unit = scheme.unit if scheme is not None else online.unit if online is not None else 1
        sharding = shard(model, parallel, place, unit)
        states = recurrent.redirect(model, parallel) if parts else ()
        kv_format = "" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        layout = cache_layout(model.config, config.block_size, dtype.itemsize, parallel, states, kv_format)
        layout = msgspec.structs.replace(layout, state_parts=parts)
        if layout.groups[0].value_dim == 0:
            latent.redirect(model, sum(len(group.layers) for group in layout.groups))
            indexer.redirect(model)
        names = TextNames(hf_config, model) if hf_config is not text and source.weights else None
        weights = open_weights(source, model, sharding, gguf, names, scheme)
        bf16 = config.cpu_arithmetic == "bf16"
        products = NO_PRODUCTS if config.deterministic else products_of(place)
        no_codes = "--deterministic has no products of codes" if config.deterministic else None
        no_codes = no_codes or weight_only.missing(place, dtype)
        plan = plan or surgery.SurgeryPlan(
            deterministic=config.deterministic, bf16=bf16, products=products, few_bits=no_codes is None
        )
        packed = stays_packed(plan, place, dtype)
        if bf16 and not packed:
            why = library.missing() or f"this replica runs in {dtype} on {place.type}".replace("torch.", "")
            raise ModelUnsupportedError(
                f"--cpu-arithmetic bf16 is for CPUs, --dtype float32 and the C++ kernels, but {why}: leave it out."
            )
        if online is not None and plan.linears:
            mixture = any(is_experts(part) for part in model.modules())
            has_product = plan.few_bits or (config.quantization == "fp8" and plan.products.outputs and not mixture)
            _check_quantization(config, place, packed, None if has_product else no_codes)
        kept = None if not packed else torch.bfloat16 if bf16 else torch.float32
        packable = isinstance(weights, GgufWeights) and weights.packable > 0
        has_codes = scheme is not None or online is not None or packable
        try:
            weight_bytes, dequantized = fill(
                model, weights, sharding, place, dtype, report,
                packed=kept, products=plan.products, few_bits=plan.few_bits, online=online,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            why = f": its codes are dequantized, since {no_codes}" if has_codes and no_codes else ""
            raise MemoryTooSmallError(
                f"The weights do not fit into the memory of this device{why}. Use more ranks (--tp, --pp)."
            ) from error
        if isinstance(weights, GgufWeights) and (factors := weights.rope_factors()) is not None:
            buffers.scale_rotary(model, factors)
        check_filled(model)
        notes = surgery.apply(model, plan)
        rounded = surgery.rounded_linears(model)
        check_filled(model)
        sharding.connect(model)
        if plan.joined:
            notes.append(str(surgery.join_layers(model, plan.native and not kv_format)))
        facts = facts_job.result()
        facts = replace(facts, defaults=facts.defaults | config.defaults)
    warnings = find_slow_backends() if place.type == "cpu" else []
    if place.type == "cpu" and kv_format:
        warnings.append(f"Attention over keys and values in {kv_format} is computed by torch on CPUs: it is slow.")
    if place.type != "cpu" and getattr(text, "index_topk", None):
        warnings.append(
            "The indexer of this model is computed by torch on GPUs so far, and its steps are not recorded: it is slow."
        )
    if dequantized and place.type != "cpu":
        size = f"{dequantized / 2**20:,.0f} MiB of {str(dtype).removeprefix('torch.')}"
        why = no_codes or "there are no products for their shapes"
        warnings.append(f"Quantized matrices are dequantized, to {size} in all, since {why}.")
    if dequantized and place.type == "cpu" and not packed and gguf is None:
        why = library.missing() or f"products of codes are in float32 on CPUs: leave --dtype {config.dtype} out"
        warnings.append(f"Quantized matrices are dequantized, since {why}.")
    if bf16 and not library.has_bfloat16_products():
        warnings.append("This CPU has no products of bfloat16 (AVX512_BF16): --cpu-arithmetic exact is faster here.")
    if isinstance(weights, GgufWeights) and place.type == "cpu":
        size = f"{weight_bytes / 2**20:.0f} MiB"
        if packed and weights.packable:
            inputs = "rounded to bfloat16" if bf16 else "in float32"
            notes.append(
                f"{weights.packable} matrices stay packed as in the file, {size} in all; their inputs are {inputs}."
            )
        elif weights.packable:
            notes.append(f"Quantized weights are unpacked to {size}, since {library.missing() or f'they are {dtype}'}.")
    if source.kind == "dummy":
        notes.append("Weights are random (--load-format dummy): the output is meaningless.")
    notes.extend(facts.notes)
    warnings.extend(facts.notes)
    return LoadedModel(
        source=source,
        module=model,
        config=model.config,
        facts=facts,
        device=device,
        dtype=dtype,
        layout=layout,
        parallel=parallel,
        weight_bytes=weight_bytes,
        read_bytes=weights.read_bytes,
        notes=notes,
        warnings=warnings,
        rounded=rounded,
        quantization=config.quantization,
        few_bits=plan.few_bits and has_codes,
        deterministic=config.deterministic,
    )


def _check_quantization(config: ReplicaConfig, place: torch.device, packed: bool, no_codes: str | None) -> None:
    """Raises ModelUnsupportedError where the device does not multiply the codes that --quantization makes."""
    method, why = config.quantization, no_codes
    if place.type == "cpu":
        why = None if packed else library.missing()
        if not packed and why is None:
            raise ModelUnsupportedError(
                f"--quantization {method} is for float32 on CPUs, and this replica runs in {config.dtype}: leave "
                "--dtype out."
            )
    if why is not None:
        raise ModelUnsupportedError(f"--quantization {method} cannot be used, since {why}: leave it out.")


def stays_packed(plan: surgery.SurgeryPlan, place: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights stay in the checkpoint's bits: products are those with their values in float32, bit for bit."""
    return place.type == "cpu" and dtype is torch.float32 and plan.linears and library.missing() is None


def open_weights(
    source: ModelSource,
    model: PreTrainedModel,
    sharding: Sharding,
    gguf: GgufFile | None,
    names: TextNames | None = None,
    scheme: QuantizationScheme | None = None,
) -> Weights:
    """The checkpoint under the model's names; no tensor is read. Raises ModelLoadError, ModelUnsupportedError.

    names: of a checkpoint that has other models, too. scheme: of a quantized one.
    """
    if source.kind == "dummy":
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        return DummyWeights({name: shape for name, shape in sharding.shapes.items() if name not in tied})
    if gguf is not None:
        return GgufWeights(gguf)
    stored = SafetensorsWeights(source.weights)
    weights = stored if scheme is None else QuantizedWeights(stored, scheme, sharding.shapes)
    return converted(weights, model, sharding.shapes, names)
