"""The Triton kernels compile for an H200, with the instructions that their speed and their bits depend on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_kernels import catalog

# Instructions of a warp, and of which loop: over tiles of 32 keys of latents, of 128 keys of 8 bits (by four warps;
# those with masks), and over tokens (8 of a convolution).
LOOPS = {
    ("decode of e4m3", "attend"): 1050,
    ("decode of int8", "attend"): 1150,
    ("latents of 128 heads", "attend"): 1150,
    ("latents of 16 heads", "attend"): 600,
    ("states", "causal_conv"): 520,
    ("states", "delta_rule"): 700,
    ("states", "ssd"): 420,
    ("states", "selective_scan"): 360,
}
ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 227 << 10  # bytes that a program may have on sm_90
KERNELS = {
    "attend", "plan", "attend_ordered", "merge_ordered", "rms_norm", "silu_mul", "write_kv", "rope_write_kv",
    "row_logsumexp", "rope_angles", "draw_pieces", "decide", "causal_conv", "delta_rule", "ssd", "selective_scan",
    "gated_rms_norm", "write_part", "round_rows", "rounded_rms_norm", "rounded_silu_mul",
}  # fmt: skip


@pytest.mark.skipif("triton" not in catalog.WRITE_KV.available(), reason="no Triton: pip install triton")
def test_for_an_h200(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "kernels"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/kernels/compile_for_hopper.py")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert {fact["kernel"] for fact in facts} == KERNELS
    # A kernel that is launched while another one runs waits for that one before it reads anything.
    early = [fact for fact in facts if fact["waits"] or fact["launches"]]
    assert {(fact["kernel"], fact["waits"], fact["launches"]) for fact in early} == {
        ("attend", True, False), ("rope_write_kv", False, True)
    }  # fmt: skip
    assert all(fact["waits_first"] for fact in early if fact["waits"])
    for fact in facts:
        assert fact["cubin"] and fact["shared"] <= SHARED_MEMORY and not fact["loses_order"], fact
        if fact["kernel"] in ("attend", "attend_ordered"):
            assert fact["cp_async"], "keys are fetched while others are multiplied"
            assert fact["label"] == "exact" or fact["mma"] or fact["wgmma"], fact
        if fact["label"] == "noise" or (fact["label"] == "ordered"):
            assert not fact["fma"], "fixed bits allow no fused rounding"
    for fact in facts:
        if most := LOOPS.get((fact["label"], fact["kernel"])):
            length, on_stack = fact["loop"]
            assert 0 < length <= most and on_stack <= 4, fact
    instructions = {fact["kernel"]: fact["per_logit"] for fact in facts if fact["per_logit"]}
    assert instructions["draw_pieces"] <= 36 and instructions["decide"] <= 31, instructions
    assert all(any(f["wgmma"] for f in facts if f["label"] == label) for label in ("prefill", "ordered"))
