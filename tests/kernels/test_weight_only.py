"""Weights as humming-kernels stores them: the values of the codes, but for scales in 16 bits."""

from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headrace_kernels.gpu.weight_only import can_multiply, humming_tensors, layer_config
from headrace_kernels.packed import E2M1_NUMBERS, Codes, Kind, stack


def _codes(kind: Kind, bits: int, group: int, zeros: str) -> Codes:
    codes = torch.randint(0, 1 << bits, (128, 256), dtype=torch.uint8)
    if kind is Kind.E4M3:
        codes = torch.where(codes & 127 == 127, codes - 1, codes)  # not a number
    scale = torch.exp2(torch.randint(-8, 0, (128, 256 // group)).float())  # exact in 16 bits
    if zeros == "of each group":
        return Codes(codes, scale, -torch.randint(0, 1 << bits, scale.shape) * scale)
    offset = {"half": 1 << bits - 1, "one": 3, "none": 0}[zeros]
    return Codes(codes, scale, None, offset, kind)


def _unpack(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize(
    ("kind", "bits", "zeros"),
    [
        *((Kind.INTEGER, bits, zeros) for bits in (4, 8) for zeros in ("half", "one", "of each group")),
        (Kind.E4M3, 8, "none"),
        (Kind.E2M1, 4, "none"),
    ],
)
def test_values(kind: Kind, bits: int, zeros: str, group: int) -> None:
    codes = _codes(kind, bits, group, zeros)
    assert can_multiply(codes)
    described, tensors = humming_tensors(codes, bits, torch.bfloat16)
    numbers = _unpack(tensors["weight"], bits)
    if kind is Kind.E4M3:
        values = numbers.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif kind is Kind.E2M1:
        values = torch.tensor(E2M1_NUMBERS)[numbers]
    else:
        assert described.get("has_zero_point", False) is (zeros != "half")
        zero = _unpack(tensors["zero_point"].T, bits).T if zeros != "half" else torch.tensor([[1 << bits - 1]])
        values = (numbers - zero.repeat_interleave(256 // zero.shape[1], 1)).float()
    wanted = torch.float8_e8m0fnu if kind is Kind.E2M1 else torch.bfloat16
    assert tensors["weight_scale"].dtype is wanted
    assert described["weight_scale_group_size"] == (0 if group == 256 else group)
    values = values * tensors["weight_scale"].float().repeat_interleave(group, 1)
    assert torch.equal(values, codes.dense())


def test_minima_that_are_no_multiple_of_the_scale() -> None:
    """Those of GGUF's formats: 0.4 % of a minimum is lost."""
    codes = Codes(torch.randint(0, 16, (64, 128), dtype=torch.uint8), torch.rand(64, 4), -torch.rand(64, 4) * 5)
    described, tensors = humming_tensors(codes, 4, torch.bfloat16)
    assert described["is_fp_zero_point"] and tensors["zero_point"].dtype is torch.bfloat16
    numbers = _unpack(tensors["weight"], 4) - tensors["zero_point"].float().repeat_interleave(32, 1)
    values = numbers * tensors["weight_scale"].float().repeat_interleave(32, 1)
    assert float((values - codes.dense()).abs().max()) < 0.08


def test_scales_of_mxfp4_in_float16() -> None:
    """Exponents below those of its normal numbers would be lost."""
    described, tensors = humming_tensors(_codes(Kind.E2M1, 4, 32, "none"), 4, torch.float16)
    assert "bs_dtype" not in described and tensors["weight_scale"].dtype is torch.float16


def test_shapes_that_are_not_multiplied() -> None:
    assert not can_multiply(Codes(torch.zeros(100, 256, dtype=torch.uint8), torch.ones(100, 2)))
    assert not can_multiply(Codes(torch.zeros(128, 192, dtype=torch.uint8), torch.ones(128, 24)))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """humming-kernels as on an H200, on a machine without a GPU."""
    pytest.importorskip("humming")
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    from humming import device, ops

    info = SimpleNamespace(
        index=0, name="NVIDIA H200", is_ppu=False, sm_count=132, sm_major=9, sm_minor=0, sm_version=90,
        max_threads_per_block=1024, max_threads_per_sm=2048, max_registers_per_sm=65536, sm_clock_khz=1980000,
        l2_cache_size=50 << 20, l2_cache_size_mb=50.0, l1_cache_size=256 << 10, l1_cache_size_kb=256.0,
        default_smem_size=49152, max_smem_size=232448, max_smem_size_kb=227.0, memory_clock_khz=3201000,
        memory_bus_width=6144, memory_bandwidth_gbps=4800.0, tensorcore_tops={},
    )  # fmt: skip
    monkeypatch.setattr(device.current_device, "_value", info)
    monkeypatch.setattr(device.DeviceInfo, "_instances", {0: device.current_device})
    monkeypatch.setattr(ops, "register_kernel", lambda _file: (1, "kernel"))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    ("kind", "bits", "group", "zeros"),
    [
        (Kind.INTEGER, 4, 128, "half"),
        (Kind.INTEGER, 4, 32, "of each group"),
        (Kind.INTEGER, 8, 256, "half"),
        (Kind.E4M3, 8, 128, "none"),
        (Kind.E2M1, 4, 32, "none"),
        (Kind.E2M1, 4, 16, "none"),
    ],
)
def test_kernels_compile(kind: Kind, bits: int, group: int, zeros: str, experts: int) -> None:
    """humming's own checks accept the tensors, and its kernels for few and many rows compile for an H200."""
    _compile(_codes(kind, bits, group, zeros), bits, experts)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("outputs", "inputs"), [(136, 288), (2880, 1440), (2880, 2880)])
def test_kernels_of_padded_weights_compile(outputs: int, inputs: int) -> None:
    """As of gpt-oss, on one and two ranks."""
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
    _compile(Codes(codes, torch.ones(outputs, inputs // 32), kind=Kind.E2M1), 4, experts=4)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hopper")
def test_kernels_of_other_minima_compile() -> None:
    _compile(Codes(torch.ones(128, 256, dtype=torch.uint8), torch.rand(128, 8), -torch.rand(128, 8)), 4, experts=0)


def _compile(codes: Codes, bits: int, experts: int) -> None:
    from humming.kernel.humming import HummingKernel
    from humming.transform import check_and_pad_tensors
    from humming.tune import get_heuristics_config

    bias = torch.zeros(codes.shape[0])
    if experts:
        codes, bias = stack([codes] * experts), torch.stack([bias] * experts)
    config, tensors = layer_config(codes, bits, torch.bfloat16, bias)
    check_and_pad_tensors(config, tensors)
    known = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
    for rows in (1, 256):
        how = "grouped_contiguous" if experts else "dense"
        tuning = get_heuristics_config(config, shape_m=rows, gemm_type=how, device=0)
        HummingKernel(**known, gemm_type=how, **tuning)
