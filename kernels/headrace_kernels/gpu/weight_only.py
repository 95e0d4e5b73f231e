"""Products with weights of 4 and 8 bits and inputs of 16 on GPUs, by humming-kernels: W4A16 and W8A16.

humming compiles a kernel for each shape and range of rows when it is first called, with NVRTC, and keeps it on disk
(HUMMING_CACHE_DIR). Its weights are in an order of its own, which it makes on the GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from headrace_kernels.packed import Codes, Kind

REQUIRED = "0.1.20"
_CAPABILITY = (8, 0)
_LOCKS = 2048  # numbers by which a product's programs wait for each other
_WHOLE = 1e-3  # by which the quotient of minimum and scale may differ from a whole number
_TILE = (128, 64)  # outputs, and inputs: weights are padded to whole ones by zeros
_GROUPED = '{"gemm_type": "grouped_contiguous"}'
_SMALLEST_GROUP, _OUTPUTS = 16, 8  # inputs with one scale, and outputs of a unit (a unit's zeros are words of 32 bits)


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device has no such products with inputs of this dtype, as a clause; None if it has."""
    if device.type != "cuda":
        return "they are for GPUs"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"products of codes are for bfloat16 and float16, and this replica runs in {dtype}".replace("torch.", "")
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "products of codes are for GPUs of compute capability 8.0 and more"
    try:
        found = version("humming-kernels")
    except PackageNotFoundError:
        return "humming-kernels is not installed (pip install 'headrace[quantized]')"
    return None if found == REQUIRED else f"humming-kernels is {found}, and {REQUIRED} is required"


@dataclass(frozen=True, slots=True)
class FewBits:
    """A weight [out, in], or those of experts [X, out, in], with their biases, on a GPU, in humming's order."""

    outputs: int
    inputs: int
    config: Any  # humming's LayerConfig
    tensors: Mapping[str, Tensor]
    locks: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def can_multiply(codes: Codes) -> bool:
    """Whether its shape and groups allow it."""
    return codes.shape[-2] % _OUTPUTS == 0 and codes.group % _SMALLEST_GROUP == 0


def humming_tensors(codes: Codes, bits: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description of a weight for humming, and its tensors as humming stores them: codes of `bits` bits along the
    inputs, zeros along the outputs, in words of 32 bits, the first one in the lowest bits; scales in `dtype`, those of
    MXFP4 as exponents for bfloat16. Of experts all have the dimension of experts first.
    """
    whole = codes.group == codes.shape[-1]
    described: dict[str, Any] = {
        "b_dtype": {Kind.E4M3: "float8e4m3", Kind.E2M1: "float4e2m1"}.get(codes.kind, f"uint{bits}"),
        "weight_scale_group_size": 0 if whole else codes.group,
    }
    tensors = {"weight": _words(codes.codes, bits), "weight_scale": codes.scale.to(dtype)}
    # In float16 humming would round exponents below -14 to zero.
    if codes.kind is Kind.E2M1 and dtype is torch.bfloat16 and (exponents := _exponents(codes.scale)) is not None:
        described["bs_dtype"] = "float8e8m0"
        tensors["weight_scale"] = exponents
    zeros = _zeros(codes, bits) if codes.kind is Kind.INTEGER else None
    if zeros is None:
        return described, tensors
    rounded = zeros.round().clamp(0, (1 << bits) - 1)
    described["has_zero_point"] = True
    if float((zeros - rounded).abs().max()) < _WHOLE:
        tensors["zero_point"] = _words(rounded.to(torch.uint8).mT, bits).mT.contiguous()
    else:  # minima of their own, as those of GGUF files
        described["is_fp_zero_point"] = True
        tensors["zero_point"] = zeros.to(dtype)
    return described, tensors


def _exponents(scale: Tensor) -> Tensor | None:
    """Scales as exponents in a byte; None unless all are powers of two."""
    fractions, exponents = torch.frexp(scale.float())
    if not bool((fractions == 0.5).all()):
        return None
    return (exponents + 126).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def _zeros(codes: Codes, bits: int) -> Tensor | None:
    """The code of zero [out, groups] in float32; None where each is half of the range."""
    if codes.minimum is not None:
        scale = codes.scale.float()
        return -codes.minimum.float() / torch.where(scale == 0, 1, scale)
    return None if codes.offset == 1 << bits - 1 else torch.full_like(codes.scale, codes.offset, dtype=torch.float32)


def _words(values: Tensor, bits: int) -> Tensor:
    """[..., n] uint8 -> [..., n * bits / 32] int32."""
    if bits == 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values.clone(memory_format=torch.contiguous_format).view(torch.int32)


def few_bits(codes: Codes, bits: int, dtype: torch.dtype, bias: Tensor | None = None) -> FewBits:
    """Codes on a GPU [out, in], or of experts [X, out, in]. bias [out], or [X, out]. dtype: of inputs and results."""
    from humming.transform import transform_humming_tensors

    config, tensors = layer_config(codes, bits, dtype, bias)
    made = transform_humming_tensors(config, tensors)
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=codes.codes.device)
    return FewBits(codes.shape[-2], codes.shape[-1], config, made, locks)


def layer_config(
    codes: Codes, bits: int, dtype: torch.dtype, bias: Tensor | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """Humming's LayerConfig for the GPU of the codes, else the current one; tensors as `humming_tensors` makes them."""
    from humming import dtypes
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    *experts, outputs, inputs = codes.shape
    place = codes.codes.device
    described, tensors = humming_tensors(codes, bits, dtype)
    if bias is not None:
        tensors["bias"] = bias.to(dtype)
    config = prepare_layer_config(
        shape_n=outputs, shape_k=inputs, weight_schema=HummingWeightSchema(**described),
        input_schema=HummingInputSchema(a_dtype=dtypes.DataType.from_torch_dtype(dtype)), torch_dtype=dtype,
        num_experts=experts[0] if experts else None, has_bias=bias is not None, pad_n_to_multiple=_TILE[0],
        pad_k_to_multiple=_TILE[1], device=place if place.type == "cuda" else None, tensors=tensors,
    )  # fmt: skip
    return config, tensors


def matmul(x: Tensor, weight: FewBits, offsets: Tensor | None = None) -> Tensor:
    """x [..., in] -> [..., out], in the dtype of x, with the bias.

    Of experts x is [R, in], offsets [X + 1] int64: expert i multiplies the rows offsets[i] to offsets[i + 1]. What is
    returned for the rows from offsets[X] on is not computed.
    """
    from humming.forward import humming_forward

    rows = x.reshape(-1, weight.inputs)
    grouped = {} if offsets is None else {"expert_layout": offsets, "compute_config": _GROUPED}
    out: Tensor = humming_forward(weight.config, rows, locks=weight.locks, **grouped, **weight.tensors)
    return out.view(*x.shape[:-1], weight.outputs)
