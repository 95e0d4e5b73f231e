"""Loads weights into a model on meta: each tensor is read and converted once, and none may stay unfilled."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headrace_base.errors import ModelLoadError
from headrace_kernels.gpu.weight_only import can_multiply
from headrace_kernels.packed import Codes, Form, Kind
from headrace_kernels.rounded import NO_PRODUCTS, Products, scaled_weight
from headrace_worker.core.progress import Progress
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.packable import (
    PackableExperts,
    PackableLinear,
    PackableMatrix,
    PackedEmbedding,
    can_be_packed,
    put_packable,
)
from headrace_worker.model.safetensors_files import IGNORED_SUFFIXES, open_files
from headrace_worker.model.sharding.cuts import Cuts, spans_of
from headrace_worker.model.sharding.shard import Sharding


class Weights(Protocol):
    """Named tensors of a checkpoint, read one at a time, each whole or in part."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the checkpoint's files that were read so far."""
        ...

    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, cuts: Cuts = ()) -> Tensor: ...
    def read_codes(self, name: str, cuts: Cuts = ()) -> PackableMatrix | PackableExperts | None:
        """Without values; None where a tensor has no codes, or is cut within their groups."""
        ...


class CodesReader(Protocol):
    """Reads matrices as codes that are stored as values."""

    def read(self, weights: Weights, name: str, stored: str, cuts: Cuts) -> PackableMatrix | PackableExperts | None:
        """The part of a parameter, stored under another name maybe; None where its values stay."""
        ...


class SafetensorsWeights:
    """Safetensors files, memory-mapped; a tensor's bytes are read on `read`."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.read_bytes = 0
        self._handles = open_files(files, "pt")

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def read(self, name: str, cuts: Cuts = ()) -> Tensor:
        check_name(name, self._handles)
        if cuts:
            view = self._handles[name].get_slice(name)
            ranges = [spans_of(cuts, dim, size) for dim, size in enumerate(view.get_shape())]
            tensor = join(ranges, lambda spans: view[tuple(slice(*span) for span in spans)])
        else:
            tensor = self._handles[name].get_tensor(name)
        self.read_bytes += tensor.nbytes
        return tensor

    def dtype(self, name: str) -> str:
        """As the file's header names it: F8_E4M3 and so on."""
        return str(self._handles[name].get_slice(name).get_dtype())

    def read_codes(self, _name: str, _cuts: Cuts = ()) -> None:
        return None


class DummyWeights:
    """Random weights for any model: the same for the same config, whatever the order of reading.

    All tensors are slices of one noise buffer, whose length has no factor in common with usual sizes, at offsets that
    depend on their names: sampling normal noise for each of billions of weights would take minutes.
    """

    _NOISE = (1 << 20) + 7  # a prime

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, scale: float = 0.02) -> None:
        """`shapes`: of the whole model's tensors."""
        self.read_bytes = 0
        self._shapes = shapes
        self._noise = torch.randn(self._NOISE, generator=torch.Generator().manual_seed(seed)) * scale

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, cuts: Cuts = ()) -> Tensor:
        shape = self._shapes[name]
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        offset, size = int.from_bytes(digest, "little") % self._NOISE, prod(shape)
        rolled = self._noise.roll(-offset)
        values = rolled.repeat(-(-size // self._NOISE))[:size].view(shape)
        values = cut_tensor(values, cuts)
        # A norm's scale is near one, and anything else near zero, as in a trained model.
        return values + 1 if "norm" in name and name.endswith("weight") else values.clone()

    def read_codes(self, _name: str, _cuts: Cuts = ()) -> None:
        return None


def cut_tensor(tensor: Tensor, cuts: Cuts) -> Tensor:
    """The part of a whole tensor that `cuts` keep; a view if one span of each dimension is kept."""
    for cut in cuts:
        parts = [tensor.narrow(cut.dim, start, stop - start) for start, stop in cut.spans]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    return tensor


def join(ranges: Sequence[Sequence[Span]], read: Callable[[tuple[Span, ...]], Tensor]) -> Tensor:
    """One tensor from the blocks that `read` returns for each combination of spans, one span per dimension."""

    def gather(chosen: tuple[Span, ...]) -> Tensor:
        if len(chosen) == len(ranges):
            return read(chosen)
        parts = [gather((*chosen, span)) for span in ranges[len(chosen)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))

    return gather(())


def check_name(name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ModelLoadError(f"The checkpoint has no tensor {name!r}.")


class Filled(NamedTuple):
    """Bytes of a rank's parameters and buffers, and those of matrices of codes that were dequantized."""

    placed: int
    dequantized: int


def fill(
    model: nn.Module,
    weights: Weights,
    sharding: Sharding,
    device: torch.device,
    dtype: torch.dtype,
    report: Progress,
    *,
    packed: torch.dtype | None = None,
    products: Products = NO_PRODUCTS,
    few_bits: bool = False,
    online: CodesReader | None = None,
) -> Filled:
    """Load every parameter and persistent buffer of a rank's model.

    Parts of other ranks are not read. Floating-point tensors are converted to `dtype`, except those that the model
    keeps in float32. Tied parameters stay one tensor. packed: of matrices of linears and embeddings codes stay
    codes, bfloat16 stays, others become this dtype, and codes of routed experts stay; None: all become `dtype`.
    products: codes in e4m3 of linears for which the device has such a product stay, on the device; few_bits: others,
    and those of experts. online: makes codes of matrices that have none. Raises ModelLoadError as `match` does.
    """
    sources, shared = match(model, weights, sharding)
    keep_float32: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    wanted = model.state_dict(keep_vars=True)
    placed = expanded = 0
    for done, (name, stored) in enumerate(sources.items()):
        if done % 16 == 0:
            report("loading weights", done / len(sources))
        cuts = sharding.cuts.get(name, ())
        strict = any(part in keep_float32 for part in name.split("."))
        stays = packed is not None and can_be_packed(model, name)
        matrix = weights.read_codes(stored, cuts)
        if matrix is None and online is not None:
            matrix = online.read(weights, name, stored, cuts)
        if (any(products) or few_bits) and matrix is not None and can_be_packed(model, name):
            on_gpu = None if strict else _on_gpu(model, name, matrix, device, dtype, products, few_bits)
            if on_gpu is not None:
                matrix, stays = on_gpu, True
        if matrix is not None and not stays:  # its values never exist on the host, unless that is the device
            tensor, matrix = _expand(matrix, device, torch.float32 if strict else dtype), None
            expanded += tensor.nbytes
        elif matrix is None:
            tensor = weights.read(stored, cuts)
            if stays and tensor.is_floating_point() and tensor.dim() == 2:
                matrix = _packable(tensor, tensor.dtype if strict else packed)
        if matrix is not None:
            put_packable(model, name, matrix)
            placed += matrix.nbytes
            continue
        if name in sharding.zeros:
            tensor = torch.zeros_like(tensor)
        if wanted[name].is_floating_point() and not tensor.is_floating_point():
            raise ModelLoadError(
                f"Tensor {stored!r} holds {tensor.dtype}, but the model computes with floating-point weights: the "
                "checkpoint is quantized in a way that is not supported."
            )
        target = tensor.dtype
        if tensor.is_floating_point():
            target = torch.float32 if strict else dtype
        # Always a copy: a mapped file may be replaced meanwhile, and a view keeps the whole tensor in memory.
        tensor = tensor.to(device=device, dtype=target, copy=not isinstance(weights, DummyWeights))
        _put(model, name, tensor)
        placed += tensor.nbytes
    for name, source in shared.items():
        owner = model.get_submodule(source.rpartition(".")[0])
        if isinstance(owner, PackableLinear | PackedEmbedding):
            put_packable(model, name, owner.matrix)
        else:
            _put(model, name, model.get_parameter(source))
    report("loading weights", 1.0)
    return Filled(placed, expanded)


def _on_gpu(
    model: nn.Module,
    name: str,
    matrix: PackableMatrix | PackableExperts,
    device: torch.device,
    dtype: torch.dtype,
    products: Products,
    few_bits: bool,
) -> PackableMatrix | PackableExperts | None:
    """The same codes on the device; None unless that has products for them: of 8-bit numbers, or of few bits."""
    owner = name.rpartition(".")[0]
    if isinstance(matrix, PackableExperts):
        if not few_bits or not all(_has_few_bits(one) for one in matrix.matrices):
            return None
        moved = [one.to(device, dtype, on_gpu=True) for one in matrix.matrices]
        return PackableExperts(moved, transposed=matrix.transposed)
    if type(model.get_submodule(owner)) is not nn.Linear or not isinstance(matrix.values, Codes):
        return None
    codes = matrix.values
    weight = scaled_weight(codes.codes, codes.scale) if codes.kind is Kind.E4M3 else None
    rounds = weight is not None and (products.blocks if weight.in_blocks else products.outputs)
    if not rounds and not (few_bits and can_multiply(codes)):
        return None
    return matrix.to(device, dtype, on_gpu=True, rounding=(owner,) if rounds else ())


def _has_few_bits(matrix: PackableMatrix) -> bool:
    return isinstance(matrix.values, Codes) and matrix.order is None and can_multiply(matrix.values)


def _expand(matrix: PackableMatrix | PackableExperts, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The values of a matrix of codes, or of experts, made on the device in parts."""
    if isinstance(matrix, PackableExperts):
        stack = torch.empty(matrix.shape, dtype=dtype, device=device)
        for values, one in zip(stack, matrix.matrices, strict=True):
            values.copy_(_expand(one, device, dtype).T if matrix.transposed else _expand(one, device, dtype))
        return stack
    return matrix.to(device, dtype).dense(dtype)


def _packable(tensor: Tensor, dtype: torch.dtype | None) -> PackableMatrix:
    """In bfloat16 if the tensor is, or if this is the dtype; else in float32."""
    if torch.bfloat16 in (tensor.dtype, dtype) and tensor.shape[1] % 8 == 0:
        return PackableMatrix(tensor.to(torch.bfloat16, copy=True), Form.BFLOAT16)
    return PackableMatrix(tensor.to(torch.float32, copy=True), Form.FLOAT32)


def match(model: nn.Module, weights: Weights, sharding: Sharding) -> tuple[dict[str, str], dict[str, str]]:
    """The tensors that a rank reads (its name -> the stored name), and its tied tensors (name -> source).

    Names and shapes are checked for the whole model. Raises ModelLoadError when a tensor is missing, has another shape
    than in the config, or is left over.
    """
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names = _match_names(model, set(weights), set(sharding.shapes), tied)
    for name, stored in names.items():
        expected, found = sharding.shapes[name], weights.shape(stored)
        if expected != found:
            raise ModelLoadError(
                f"Tensor {stored!r} has shape {list(found)}, but the config requires {list(expected)}: "
                "weights and config.json do not belong together."
            )
    local = list(model.state_dict(keep_vars=True))
    shared = {name: tied[name] for name in local if name not in names and tied[name] in local}
    # A tied head whose embedding is on another stage is a separate tensor here.
    return {name: names.get(name) or names[tied[name]] for name in local if name not in shared}, shared


def _match_names(model: nn.Module, stored: set[str], wanted: set[str], tied: dict[str, str]) -> dict[str, str]:
    """Model name -> checkpoint name, for every tensor to read."""
    prefix = f"{getattr(model, 'base_model_prefix', 'model')}."
    names: dict[str, str] = {}
    for name in wanted:
        bare = name.removeprefix(prefix)
        if name in stored:
            names[name] = name
        elif bare in stored:  # a checkpoint of the model without its head
            names[name] = bare
    # The two names of a tied tensor are one tensor, unless the checkpoint contains both.
    for target, source in tied.items():
        if target in names and source not in names:
            names[source] = names.pop(target)
    missing = sorted(wanted - set(names) - set(tied))
    if missing:
        raise ModelLoadError(
            f"The checkpoint lacks {len(missing)} of the model's {len(wanted)} tensors, {missing[0]!r} first: "
            "it is incomplete, or belongs to another config."
        )
    used = set(names.values())
    # The family's own declaration of tensors that its causal model does not need, as of heads for further tokens.
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    extra = sorted(
        entry
        for entry in stored - used
        if not entry.endswith(IGNORED_SUFFIXES)
        and entry not in tied
        and not any(pattern.search(entry) for pattern in ignored)
    )
    if extra:
        raise ModelLoadError(
            f"The checkpoint has {len(extra)} tensors that the model does not have, {extra[0][:200]!r} first: "
            "it belongs to another config, or is quantized in a way that is not supported."
        )
    return names


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._parameters:
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        owner._parameters[leaf] = parameter
    else:
        owner._buffers[leaf] = tensor


def check_filled(model: nn.Module) -> None:
    """Raise ModelLoadError if any parameter or buffer is still on meta."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ModelLoadError(f"{name!r} was left without values after loading: this model cannot be served.")
