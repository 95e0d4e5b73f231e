"""Compiles the kernels of the Triton launchers for an H200 (sm_90), on a machine without a GPU; prints facts as JSON.

The launchers run unchanged, with CPU tensors; only Triton's driver is replaced, and kernels are compiled where they
would be launched. A separate process: test_compiles.py starts it.
"""

import json
import os
import re
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace_kernels import AttentionMeta, DrawOptions
from headrace_kernels.gpu import attention, cache, draw, elementwise, recurrent, rounded, scans, softmax
from headrace_kernels.gpu.availability import EARLY_SWITCH, launches_early
from headrace_kernels.meta import HeadNorms, StateMeta

LOOPS = ("states", "latents of 128 heads", "latents of 16 heads", "decode of e4m3", "decode of int8")
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


def _loop(compiled: Any) -> tuple[int, int]:
    """Instructions of the longest innermost loop, of those with products if there are any, and those on the stack."""
    lines = [line for line in compiled.asm["sass"].splitlines() if line.strip()]
    labels = {line.split(":")[0].strip(): at for at, line in enumerate(lines) if line.startswith("LBB")}
    loops = []
    for at, line in enumerate(lines):
        jump = re.search(r"BRA.*?(LBB\w+)", line)
        if jump and labels.get(jump[1], at) < at:
            loops.append((labels[jump[1]], at))
    inner = [lines[a:b] for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    products = [loop for loop in inner if any("MMA" in line for line in loop)]
    longest = max(products or inner, key=len, default=[])
    return len(longest), sum("STL" in line or "LDL" in line for line in longest)


def _loses_order(compiled: Any) -> bool:
    """Whether a reduction returns an index of numbers that are reordered before it, as Triton does with a reshape."""
    text = compiled.asm["ttgir"]
    reordered = set(re.findall(r"(%\S+) = tt.reshape %\S+ allow_reorder", text))
    return any(reordered & {*inputs.split(", ")} for inputs in re.findall(r'"tt.reduce"\((.+?, .+?)\)', text))


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
                "loses_order": _loses_order(compiled),
                "per_logit": _per_logit(kernel.fn.__name__, compiled),
                "loop": _loop(compiled) if label in LOOPS else None,
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


def _latents(name: str, heads: int, query_len: int, key: int, value: int, shared: bool, **options: Any) -> None:
    global label
    label = name
    keys = torch.zeros(4, 1, SIZE, key, dtype=torch.bfloat16)
    values = keys[..., :value] if shared else torch.zeros(4, 1, SIZE, value, dtype=torch.bfloat16)
    meta = AttentionMeta(
        torch.arange(3, dtype=torch.int32) * query_len,
        torch.full((2,), 4096, dtype=torch.int32),
        torch.zeros(2, 256, dtype=torch.int32),
        torch.zeros(2 * query_len, dtype=torch.int64),
        query_len,
        4096,
    )
    query = torch.zeros(2 * query_len, heads, key, dtype=torch.bfloat16)
    attention.uneven_attention(query, keys, values, meta, scale=1.0, **options)


def _states(dtype: torch.dtype) -> None:
    """Layers with recurrent state of Qwen3.5-9B, Kimi Linear, Nemotron-H and Jamba."""
    global label
    label = "states"
    slots = torch.zeros(TOKENS, dtype=torch.int32)
    meta = StateMeta(torch.zeros(TOKENS + 1, dtype=torch.int32), slots, slots)

    def new(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    recurrent.causal_conv(new(TOKENS, 8192), new(8192, 4), new(4, 3, 8192), meta, None, True)
    heads, states = new(TOKENS, 64, 128), new(4, 32, 128, 128, kind=torch.float32)
    query, key, value = heads[:, :16], heads[:, 16:32], heads[:, 32:]
    for decay in (new(TOKENS, 32, kind=torch.float32), new(TOKENS, 32, 128, kind=torch.float32)):
        recurrent.delta_rule(query, key, value, decay, new(TOKENS, 32), states, meta)
    x, key, query = new(TOKENS, 128, 64), new(TOKENS, 8, 128), new(TOKENS, 8, 128)
    scalars = new(128, kind=torch.float32)
    pool = new(4, 128, 64, 128, kind=torch.float32)
    scans.ssd(x, new(TOKENS, 128), scalars, key, query, pool, meta, scalars, scalars)
    channels, size = new(TOKENS, 8192), new(TOKENS, 16)
    rates, each = new(8192, 16, kind=torch.float32), new(8192, kind=torch.float32)
    pool = new(4, 8192, 16, kind=torch.float32)
    scans.selective_scan(channels, channels, rates, size, size, pool, meta, each, channels, each)
    scans.gated_rms_norm(heads, heads, new(128), 1e-6)


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
    for groups in (False, True):
        rounded.round_rows(x, groups)
        rounded.rounded_rms_norm(x, x, weight, 1e-5, groups)
        rounded.rounded_silu_mul(torch.zeros(TOKENS, 2 * 14336, dtype=dtype), groups)
    for pool_dtype in (dtype, torch.float8_e4m3fn):
        scale = torch.zeros(2, 4, KV_HEADS, SIZE) if pool_dtype.itemsize == 1 else None
        pool = torch.zeros(2, 4, KV_HEADS, SIZE, 128).to(pool_dtype)
        cache.write_kv(key, value, pool, slots, scale)
        cache.write_part(value, pool[0] if scale is None else torch.zeros(4, KV_HEADS, SIZE, 128, dtype=dtype), slots)
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
    _attend("decode of e4m3", 1, 128, torch.float8_e4m3fn, half)
    _attend("decode of int8", 1, 128, torch.int8, half)
    _attend("8 bits", 64, 128, torch.float8_e4m3fn, half)
    sinks = torch.zeros(HEADS, dtype=half)
    _attend("everything", 64, 256, torch.int8, half, window=512, softcap=50.0, sinks=sinks)
    _attend("odd head", 64, 80, torch.float16, torch.float16)
    _attend("exact", 64, 128, torch.float32, torch.float32)
    _rest(half)
    _states(half)
    _latents("latents of 128 heads", 128, 1, 576, 512, True)
    _latents("latents of 16 heads", 16, 1, 576, 512, True)
    _latents("latents of a prompt", 16, 2048, 576, 512, True)
    _latents("latents, ordered", 16, 2048, 576, 512, True, deterministic=True)
    _latents("large keys", 16, 2048, 192, 128, False)
    _latents("large heads", 8, 2048, 512, 512, False)
    os.environ[EARLY_SWITCH] = "on"
    launches_early.cache_clear()
    _attend("early", 1, 128, half, half)
    _rest(half)
    print(json.dumps(facts))
