"""Weights into a model on meta: each tensor read once, converted once, put in place; nothing may stay unfilled."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headrace_proto.errors import ModelLoadError

Report = Callable[[str, float], None]  # (phase, fraction done)


class Weights(Protocol):
    """Named tensors of a checkpoint, read one at a time."""

    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> Tensor: ...


class SafetensorsWeights:
    """Safetensors files, memory-mapped; a tensor's bytes are read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._handles: dict[str, Any] = {}
        for path in files:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path.name} is not a whole safetensors file: download it again.") from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        check_name(name, self._handles)
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor


class DummyWeights:
    """Random weights for any model: the same for the same config, whatever the order of reading.

    All tensors are cut from one noise buffer, whose length has no factor in common with usual sizes, at offsets that
    depend on their names: normal noise drawn for each of billions of weights would take minutes.
    """

    _NOISE = (1 << 20) + 7  # a prime

    def __init__(self, model: nn.Module, seed: int = 0, scale: float = 0.02) -> None:
        self._shapes = {name: tuple(entry.shape) for name, entry in model.state_dict().items()}
        self._noise = torch.randn(self._NOISE, generator=torch.Generator().manual_seed(seed)) * scale

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        offset, size = int.from_bytes(digest, "little") % self._NOISE, prod(shape)
        rolled = self._noise.roll(-offset)
        values = rolled.repeat(-(-size // self._NOISE))[:size].view(shape)
        # A norm's scale is near one, and anything else near zero, as in a trained model.
        return values + 1 if "norm" in name and name.endswith("weight") else values.clone()


def check_name(name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ModelLoadError(f"The checkpoint has no tensor {name!r}.")


def fill(model: nn.Module, weights: Weights, device: torch.device, dtype: torch.dtype, report: Report) -> int:
    """Put every parameter and persistent buffer in place and return the bytes that they take.

    Floating-point tensors are converted to `dtype`, except those that the model keeps in float32. Tied parameters
    stay one tensor. Raises ModelLoadError when a tensor is missing, has another shape than the config says, or is
    left over.
    """
    wanted = {name: entry for name, entry in model.state_dict(keep_vars=True).items()}
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names = _match_names(model, set(weights), set(wanted), tied)
    keep_float32: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    placed = 0
    for done, (name, stored) in enumerate(names.items()):
        expected, found = tuple(wanted[name].shape), weights.shape(stored)
        if expected != found:
            raise ModelLoadError(
                f"Tensor {stored!r} has shape {list(found)}, but the config asks for {list(expected)}: "
                "weights and config.json do not belong together."
            )
        tensor = weights.read(stored)
        target = tensor.dtype
        if tensor.is_floating_point():
            target = torch.float32 if any(part in keep_float32 for part in name.split(".")) else dtype
        # A copy even when nothing changes: a mapped file may be replaced under us.
        tensor = tensor.to(device=device, dtype=target, copy=isinstance(weights, SafetensorsWeights))
        _put(model, name, tensor)
        placed += tensor.nbytes
        if done % 16 == 0:
            report("loading weights", done / len(names))
    for target_name, source_name in tied.items():
        if target_name not in names:
            _put(model, target_name, model.get_parameter(source_name))
    report("loading weights", 1.0)
    return placed


def _match_names(model: nn.Module, stored: set[str], wanted: set[str], tied: dict[str, str]) -> dict[str, str]:
    """Model name -> checkpoint name, for every tensor to read."""
    prefix = f"{getattr(model, 'base_model_prefix', 'model')}."
    ignored = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers that old checkpoints carry
    names: dict[str, str] = {}
    for name in wanted:
        bare = name.removeprefix(prefix)
        if name in stored:
            names[name] = name
        elif bare in stored:  # a checkpoint of the model without its head
            names[name] = bare
    # The two names of a tied tensor are one tensor, unless the checkpoint really holds both.
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
    extra = sorted(entry for entry in stored - used if not entry.endswith(ignored) and entry not in tied)
    if extra:
        raise ModelLoadError(
            f"The checkpoint holds {len(extra)} tensors that the model has no place for, {extra[0]!r} first: "
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
