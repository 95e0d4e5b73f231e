"""Formats of quantized checkpoints: values bit for bit, parts of matrices, what is refused and how."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace_base.errors import ModelLoadError, ModelUnsupportedError
from headrace_worker.model.headers import read_headers
from headrace_worker.model.load import load
from headrace_worker.model.packable import PackableExperts, PackableLinear, PackableMatrix, PackedLinear
from headrace_worker.model.quantized.config import read_scheme, with_quantization
from headrace_worker.model.quantized.weights import QuantizedWeights
from headrace_worker.model.sharding.cuts import Cut
from headrace_worker.model.source import resolve
from headrace_worker.model.surgery import SurgeryPlan
from headrace_worker.model.weights import SafetensorsWeights
from support.ranks.families import tiny_options
from support.worker.quantized import FLOAT_FORMATS, FORMATS, GROUPS_OF_32, INTEGER_FORMATS, save_quantized
from support.worker.tiny_models import replica_config, save_random

VECTORS = Path(__file__).parents[4] / "shared" / "formats"


def _open(file: Path) -> tuple[QuantizedWeights, dict[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
    scheme = read_scheme("llama", config)
    assert scheme is not None
    return QuantizedWeights(SafetensorsWeights([file]), scheme), load_file(file)


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the matrices of published formats are not part of the project")
@pytest.mark.parametrize(
    "name",
    [
        *("fp8_block", "fp8_tensor", "ct_fp8_channel", "awq_gemm", "gptq_sym", "gptq_act_order", "gptq_v2", "gptq_8"),
        *("ct_int4", "ct_int4_zero", "ct_int8_w8a8", "ct_mxfp4", "ct_nvfp4"),
    ],
)
def test_values_of_published_formats(name: str) -> None:
    weights, tensors = _open(VECTORS / f"{name}.safetensors")
    values = weights.read("m.weight")
    if "expected.rows" in tensors:
        assert torch.equal(values[tensors["expected.rows"]], tensors["expected.dense_rows"])
    else:
        assert torch.equal(values, tensors["expected.dense"])
    assert not {"m.weight_scale", "m.weight_scale_inv", "m.input_scale"} & {*weights}
    outputs, inputs = values.shape
    rows, columns = ((1, 7), (9, outputs)), ((3, inputs - 5),)
    part = weights.read("m.weight", (Cut(0, rows), Cut(1, columns)))
    assert torch.equal(part, torch.cat([values[1:7], values[9:]])[:, 3:-5])
    matrix = weights.read_codes("m.weight")
    assert isinstance(matrix, PackableMatrix) and torch.equal(matrix.dense(), values) and matrix.shape == values.shape
    some = weights.read_codes("m.weight", (Cut(0, rows),))
    assert isinstance(some, PackableMatrix) and torch.equal(some.dense(), torch.cat([values[1:7], values[9:]]))
    inner = weights.read_codes("m.weight", (Cut(1, columns),))
    if name in ("fp8_tensor", "ct_fp8_channel", "ct_int8_w8a8"):  # one group
        assert isinstance(inner, PackableMatrix) and torch.equal(inner.dense(), values[:, 3:-5])
    else:
        assert inner is None, "no whole groups"
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1))
    product = PackedLinear(PackableLinear(matrix, None))(x)
    expected = x.double() @ values.double().T
    assert float((product - expected).norm() / expected.norm()) < 5e-7


@pytest.mark.skipif(not VECTORS.is_dir(), reason="the matrices of published formats are not part of the project")
def test_values_of_experts_in_mxfp4() -> None:
    weights, tensors = _open(VECTORS / "mxfp4_gpt_oss.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        values, stored = tensors[f"expected.{name}"].float(), f"m.experts.{name}"
        assert weights.shape(stored) == values.shape and torch.equal(weights.read(stored), values)
        one, inputs, outputs = Cut(0, ((1, 2),)), Cut(1, ((3, 30),)), Cut(2, ((1, 7), (9, 20)))
        part = values[1:, 3:30]
        expected = torch.cat([part[..., 1:7], part[..., 9:20]], -1)
        assert torch.equal(weights.read(stored, (one, inputs, outputs)), expected)
        assert weights.read_codes(stored, (inputs,)) is None, "no whole groups"
        groups = Cut(1, ((0, 32),))
        codes = weights.read_codes(stored, (one, groups, outputs))
        assert isinstance(codes, PackableExperts) and codes.transposed and codes.shape == (1, 32, 17)
        expected = torch.cat([values[1, :32, 1:7], values[1, :32, 9:20]], 1)
        assert torch.equal(codes.matrices[0].dense().T, expected)


def test_parts_of_whole_groups_stay_codes(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    for kind in ("awq", "gptq-v2", "int4-zero", "gptq-8"):
        save_quantized(tiny("llama"), tmp_path / kind, kind)
        scheme = read_scheme("llama", INTEGER_FORMATS[kind])
        assert scheme is not None
        weights = QuantizedWeights(SafetensorsWeights([tmp_path / kind / "quantized" / "model.safetensors"]), scheme)
        name = "model.layers.0.mlp.down_proj.weight"
        values = weights.read(name)
        part = weights.read_codes(name, (Cut(0, ((3, 20),)), Cut(1, ((16, 48),))))
        assert isinstance(part, PackableMatrix) and torch.equal(part.dense(), values[3:20, 16:48])


def _change(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors.pop(f"model.layers.0.self_attn.q_proj.{name}"))
        if changed is not None:
            tensors[f"model.layers.0.self_attn.q_proj.{name}"] = changed

    return apply


@pytest.mark.parametrize(
    ("kind", "damage", "sentence"),
    [
        ("gptq", _change("scales", lambda _: None), "has no 'scales' beside it: the checkpoint is incomplete"),
        ("gptq", _change("g_idx", lambda index: index + 1), "has groups outside of 0 to 2: the checkpoint is damaged"),
        ("gptq", _change("g_idx", lambda index: index * 0), "has groups of other sizes than 16, which is not read"),
        (
            "awq",
            _change("qzeros", lambda zeros: zeros[:2].clone()),
            r"'.*qzeros' is \[2, 6\], but .* requires \[3, 6\]",
        ),
        (
            "int4",
            _change("weight_shape", lambda shape: shape // 2),
            r"has a weight_shape of \[24, 24\], which is not read",
        ),
        ("int4", _change("weight_scale", lambda scale: scale * torch.inf), "are not finite: the checkpoint is damaged"),
        ("int8-w8a8", _change("weight_scale", lambda scale: scale.T.clone()), r"requires \[48, 1\]: config.json and"),
    ],
)
def test_damaged_codes(
    kind: str,
    damage: Callable[[dict[str, torch.Tensor]], None],
    sentence: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    save_quantized(tiny("llama"), tmp_path, kind)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=sentence):
        load(replica_config(tmp_path / "quantized"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda _: None, r"gate_up_proj_blocks' has no scale beside it: the checkpoint is incomplete"),
        (lambda scales: scales[:, 1:].clone(), r"gate_up_proj_scales' is \[4, 255, 2\], but .* requires \[4, 256, 2\]"),
        (lambda scales: scales | 255, "gate_up_proj_scales' are not finite: the checkpoint is damaged"),
    ],
)
def test_damaged_experts(damage: Callable[[torch.Tensor], Any], sentence: str, tmp_path: Path) -> None:
    save_quantized(save_random(tiny_options("gpt_oss") | GROUPS_OF_32, tmp_path / "made"), tmp_path, "mxfp4-experts")
    file, name = tmp_path / "quantized" / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj_scales"
    tensors = load_file(file)
    changed = damage(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=sentence):
        load(replica_config(file.parent))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("llama", kind) for kind in {**INTEGER_FORMATS, **FLOAT_FORMATS} if kind != "mxfp4-experts"),
        *(("mixtral", "awq"), ("qwen3_moe", "fp8-block"), ("qwen3_moe", "nvfp4"), ("gpt_oss", "mxfp4-experts")),
    ],
)
def test_codes_stay_packed_on_a_cpu(family: str, kind: str, tmp_path: Path) -> None:
    twin = save_quantized(save_random(tiny_options(family) | GROUPS_OF_32, tmp_path / "made"), tmp_path, kind)
    packed, dense = (load(replica_config(folder)) for folder in (tmp_path / "quantized", twin))
    stored = load_file(tmp_path / "quantized" / "model.safetensors")
    values = load_file(twin / "model.safetensors")
    coded = sum(
        tensor.numel() for name, tensor in values.items() if name not in stored or stored[name].dtype != tensor.dtype
    )
    assert coded > 0.5 * sum(tensor.numel() for tensor in values.values())
    assert packed.weight_bytes < dense.weight_bytes - 2 * coded
    headers = read_headers(resolve(str(tmp_path / "quantized"), "auto", None))
    biases = sum(tensor.numel() for name, tensor in stored.items() if name not in values and name.endswith(".bias"))
    assert headers.elements == sum(tensor.numel() for tensor in values.values()) + biases  # zeros, which are left out
    assert headers.packed_bytes <= packed.weight_bytes + 4 * biases
    # As on a GPU: dequantized, in the model's dtype.
    plain = load(replica_config(tmp_path / "quantized"), plan=SurgeryPlan.none()).module.state_dict()
    for name, tensor in load(replica_config(twin), plan=SurgeryPlan.none()).module.state_dict().items():
        assert torch.equal(plain[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "missing"), [("awq", "qzeros"), ("nvfp4", "weight_global_scale"), ("fbgemm", "weight_scale")]
)
def test_missing_tensors_are_found_before_the_start(
    kind: str, missing: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny("llama") if kind != "nvfp4" else save_random(tiny_options("llama") | GROUPS_OF_32, tmp_path / "made")
    save_quantized(folder, tmp_path, kind)
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(ModelLoadError, match=r"has quantized tensors, .* but config.json has no quantization_config"):
        read_headers(resolve(str(file.parent)))
    (file.parent / "config.json").write_text(json.dumps(config))
    del tensors[next(name for name in tensors if name.endswith(missing))]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"beside it: the checkpoint is incomplete"):
        read_headers(resolve(str(file.parent)))


def test_several_formats_in_one_checkpoint(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Attention in e4m3, MLPs in NVFP4, as llm-compressor writes them; scales of the cache are left out."""
    made = {kind: tmp_path / kind for kind in ("compressed-tensors", "nvfp4")}
    folder = save_random(tiny_options("llama") | GROUPS_OF_32, tmp_path / "made")
    for kind, place in made.items():
        save_quantized(folder, place, kind)

    def mixed(name: str) -> dict[str, torch.Tensor]:
        parts = [load_file(place / name / "model.safetensors") for place in made.values()]
        return {
            key: value for part, own in zip(parts, ("self_attn", ""), strict=True) for key, value in part.items()
            if own in key and ("self_attn" in key) is bool(own)
        }  # fmt: skip

    configs = [json.loads((place / "quantized" / "config.json").read_text()) for place in made.values()]
    groups = [config["quantization_config"]["config_groups"]["group_0"] for config in configs]
    both = {"group_0": groups[0], "group_1": groups[1], "group_2": {"targets": ["Attention"], "weights": None}}
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": both}
    target = made["nvfp4"] / "quantized"
    (target / "config.json").write_text(json.dumps(configs[1] | {"quantization_config": quantization}))
    unused = {
        "model.layers.0.self_attn.kv_scale": torch.ones(1),
        "model.layers.0.self_attn.q_proj.weight_zero_point": torch.zeros(1),
    }
    save_file(mixed("quantized") | unused, target / "model.safetensors", {"format": "pt"})
    expected = mixed("dense")
    found = load(replica_config(target), plan=SurgeryPlan.none()).module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert read_headers(resolve(str(target))).quantized_by == "compressed-tensors"


def test_blocks_as_modelopt_writes_them(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    twin = save_quantized(tiny("llama"), tmp_path, "fp8-tensor")
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name].view(1, 1, 1, 1)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((file.parent / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt_fp8", "quant_algo": "fp8_pb_wo"}
    (file.parent / "config.json").write_text(json.dumps(config))
    found = load(replica_config(file.parent), plan=SurgeryPlan.none()).module.state_dict()
    expected = load(replica_config(twin), plan=SurgeryPlan.none()).module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_configs_of_other_tools() -> None:
    gptq = {"bits": 4, "group_size": 128, "sym": True}
    for packing, kind in (("auto_round:auto_gptq", "gptq"), ("auto_round:auto_awq", "awq")):
        scheme = read_scheme("llama", gptq | {"quant_method": "auto-round", "packing_format": packing})
        assert scheme is not None and (scheme.kind, scheme.bits, scheme.group) == (kind, 4, 128)
    four, eight = ({"weights": {"type": "int", "num_bits": bits, "group_size": 64}} for bits in (4, 8))
    packed = {"quant_method": "compressed-tensors", "config_groups": {"a": four, "b": eight}}
    for stored in ("pack-quantized", "mixed-precision"):
        scheme = read_scheme("llama", packed | {"format": stored})
        assert scheme is not None and (scheme.kind, scheme.bits, scheme.group) == ("packed", 8, 64)
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    scheme = read_scheme("llama", mixed)
    assert scheme is not None and (scheme.kind, scheme.block, scheme.unit) == ("modelopt-nvfp4", None, 16)
    with pytest.raises(ModelUnsupportedError, match=r"modelopt \(MIXED_PRECISION\), which is not served"):
        read_scheme("llama", mixed | {"quantized_layers": layers | {"c": {"quant_algo": "W4A8_AWQ"}}})


@pytest.mark.parametrize("kind", FORMATS)
def test_before_the_start(kind: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """The headers alone show that the model is served, and what memory it takes at least."""
    twin = save_quantized(tiny("llama"), tmp_path, kind)
    dense, quantized = (read_headers(resolve(str(folder))) for folder in (twin, tmp_path / "quantized"))
    assert 0 <= quantized.elements - dense.elements < 2000


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ({"quant_method": "hqq"}, r"quantized by hqq, which is not served \(fp8, .* are\): give one of these"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"quantized by fp8 \(e5m2\), which is not served"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            r"quantized by modelopt \(W4A8_AWQ\), which is not served",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            r"quantized by compressed-tensors \(pack-quantized\), which is not served",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"blocks of this quantized checkpoint are \[128, 0\]"),
        ({"quant_method": ["fp8"]}, r"quantized by \['fp8'\], which is not served"),
        ("fp8", "quantized by unknown, which is not served"),
    ],
)
def test_formats_that_are_not_served(
    quantization: Any, sentence: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    save_quantized(tiny("llama"), tmp_path, "fp8-block")
    file = tmp_path / "quantized" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(ModelUnsupportedError, match=sentence):
        read_headers(resolve(str(file.parent)))
    with pytest.raises(ModelUnsupportedError, match=sentence):
        load(replica_config(file.parent))


def test_older_places_of_the_config(tmp_path: Path) -> None:
    def found(fields: dict[str, Any]) -> Any:
        return with_quantization(tmp_path, fields, "m").get("quantization_config")

    inner = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    assert found({"text_config": {"quantization_config": inner}}) == inner
    assert found({"compression_config": {"quantization_config": inner, "sparsity_config": {}}}) == inner

    assert found({}) is None
    old = {"compression_config": {"format": "float-quantized"}}
    assert found(old) == {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "quant_config.json").write_text('{"w_bit": 4}')
    assert found({}) == {"quant_method": "awq", "w_bit": 4}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert found({}) == {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert found({"quantization_config": {"quant_method": "fp8"}}) == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("scale", r"'.*q_proj.weight' has no scale beside it: the checkpoint is incomplete, download it again"),
        ("shape", r"'.*q_proj.weight_scale_inv' is \[3, 1\], .* blocks of 48 × 40 requires \[1, 2\]: config.json and"),
        ("code", r"'.*q_proj.weight' has values that are not a number: the checkpoint is damaged"),
        ("infinite", r"'.*q_proj.weight_scale_inv' has scales that are not finite: the checkpoint is damaged"),
    ],
)
def test_damaged_tensors(damage: str, sentence: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    save_quantized(tiny("llama"), tmp_path, "fp8-block")
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    weight = next(name for name in sorted(tensors) if name.endswith("q_proj.weight"))
    scale = f"{weight}_scale_inv"
    if damage == "scale":
        del tensors[scale]
    elif damage == "shape":
        tensors[scale] = torch.ones(3, 1)
    elif damage == "code":
        tensors[weight].view(torch.uint8)[0, 0] = 0xFF
    else:
        tensors[scale][0, 0] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=sentence):
        load(replica_config(file.parent))
