"""Compiles the kernels of the Triton launchers for an H200 (sm_90), on a machine without a GPU; prints facts as JSON.

The launchers run unchanged, with CPU tensors; only Triton's driver is replaced, and kernels are compiled where they
would be launched. A separate process: test_compiles.py starts it.
"""

import json
import os
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace_kernels import AttentionMeta, DrawOptions
from headrace_kernels.gpu import attention, cache, draw, elementwise, softmax
from headrace_kernels.gpu.availability import EARLY_SWITCH, launches_early
from headrace_kernels.meta import HeadNorms

TOKENS, HEADS, KV_HEADS, SIZE, HIDDEN = 64, 32, 8, 16, 4096
facts: list[dict[str, object]] = []
label = ""


class _Driver:
    """The part of a driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _per_logit(kernel: str, compiled: Any) -> float | None:
    """Instructions of a draw for each logit: up to the test of the noise's hash, or in the loop that sums masses."""
    if kernel not in ("draw_pieces", "decide"):
        return None
    lines = compiled.asm["sass"].splitlines()
    if kernel == "draw_pieces":
        first = next(at for at, line in enumerate(lines) if "LDG.E.128" in line)
        last = next(at for at, line in enumerate(lines[first:], first) if "MUFU.EX2" in line)
        return (last - first) / (2048 / 128)
    summed = next(at for at, line in enumerate(lines) if "F2I.S64" in line)
    first = max(at for at in range(summed) if lines[at].startswith("LBB"))
    last = next(at for at in range(summed, len(lines)) if "BRA" in lines[at])
    return (last - first) / (8 * 512 / 256)


def _compile(kernel: Any, grid: tuple[int, ...]) -> Any:
    def launch(*arguments: object, **options: object) -> None:
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        ptx = compiled.asm["ptx"]
        facts.append(
            {
                "label": label,
                "kernel": kernel.fn.__name__,
                "shared": compiled.metadata.shared,
                "cubin": len(compiled.asm["cubin"]),
                "wgmma": "wgmma" in ptx,
                "mma": "mma.sync" in ptx,
                "cp_async": "cp.async" in ptx,
                "fma": "fma.rn.f32" in ptx,
                "waits": "griddepcontrol.wait" in ptx,
                "waits_first": "ld.global" not in ptx.partition("griddepcontrol.wait")[0],
                "launches": "griddepcontrol.launch_dependents" in ptx,
                "per_logit": _per_logit(kernel.fn.__name__, compiled),
            }
        )

    return launch


def _attend(
    name: str, query_len: int, head_dim: int, pool_dtype: torch.dtype, dtype: torch.dtype, **options: Any
) -> None:
    global label
    label = name
    sequences, entries = 2, 256
    pool = torch.zeros(2, 4, KV_HEADS, SIZE, head_dim, dtype=torch.float32).to(pool_dtype)
    if pool_dtype.itemsize == 1:
        options["kv_scale"] = torch.zeros(2, 4, KV_HEADS, SIZE)
    meta = AttentionMeta(
        torch.arange(sequences + 1, dtype=torch.int32) * query_len,
        torch.full((sequences,), entries * SIZE, dtype=torch.int32),
        torch.zeros(sequences, entries, dtype=torch.int32),
        torch.zeros(sequences * query_len, dtype=torch.int64),
        query_len,
        entries * SIZE,
    )
    query = torch.zeros(sequences * query_len, HEADS, head_dim, dtype=dtype)
    attention.paged_attention(query, pool, meta, scale=1.0, **options)


def _rest(dtype: torch.dtype) -> None:
    global label
    label = "rest"
    x, weight = torch.zeros(TOKENS, HIDDEN, dtype=dtype), torch.zeros(HIDDEN, dtype=dtype)
    heads = torch.zeros(TOKENS, HEADS + 2 * KV_HEADS, 128, dtype=dtype)
    query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    cos, slots = torch.zeros(TOKENS, 128, dtype=dtype), torch.zeros(TOKENS, dtype=torch.int64)
    elementwise.rms_norm(query, weight[:128], 1e-5)
    elementwise.add_rms_norm(x, x, weight, 1e-5)
    elementwise.silu_mul(x)
    elementwise.rope_angles(slots, torch.zeros(64), 1.0, dtype)
    for pool_dtype in (dtype, torch.float8_e4m3fn):
        scale = torch.zeros(2, 4, KV_HEADS, SIZE) if pool_dtype.itemsize == 1 else None
        pool = torch.zeros(2, 4, KV_HEADS, SIZE, 128).to(pool_dtype)
        cache.write_kv(key, value, pool, slots, scale)
        norms = HeadNorms(weight[:128], weight[:128], 1e-5)
        cache.rope_write_kv(query, key, value, cos, cos, pool, slots, scale)
        cache.rope_write_kv(query, key, value, cos, cos, pool, slots, scale, norms)
    softmax.row_logsumexp(torch.zeros(TOKENS, 151936))
    label = "noise"
    logits, options = torch.zeros(TOKENS, 151936, dtype=dtype), DrawOptions(torch.zeros(1, 3), slots[:2].view(1, 2))
    draw.draw(logits, slots, slots, options)


if __name__ == "__main__":
    driver.set_active(_Driver())
    JITFunction.__getitem__ = _compile
    half = torch.bfloat16
    _attend("decode", 1, 128, half, half)
    _attend("prefill", 2048, 128, half, half)
    _attend("ordered", 2048, 128, half, half, deterministic=True)
    _attend("8 bits", 64, 128, torch.float8_e4m3fn, half)
    sinks = torch.zeros(HEADS, dtype=half)
    _attend("everything", 64, 256, torch.int8, half, window=512, softcap=50.0, sinks=sinks)
    _attend("odd head", 64, 80, torch.float16, torch.float16)
    _attend("exact", 64, 128, torch.float32, torch.float32)
    _rest(half)
    os.environ[EARLY_SWITCH] = "on"
    launches_early.cache_clear()
    _attend("early", 1, 128, half, half)
    _rest(half)
    print(json.dumps(facts))
