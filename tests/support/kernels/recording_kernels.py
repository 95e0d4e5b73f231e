"""The GPU backend's launchers on CPU tensors, with kernels that only record how they would be launched.

The numbers come from the CPU's backend. Import it where Triton is installed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from headrace_kernels import catalog
from headrace_kernels.gpu import attention, cache, draw, elementwise, recurrent, rounded, scans, softmax
from headrace_kernels.gpu.kernels import attend as attend_kernels
from headrace_kernels.gpu.kernels import cache as cache_kernels
from headrace_kernels.gpu.kernels import draw as draw_kernels
from headrace_kernels.gpu.kernels import elementwise as elementwise_kernels
from headrace_kernels.gpu.kernels import plan as plan_kernels
from headrace_kernels.gpu.kernels import recurrent as recurrent_kernels
from headrace_kernels.gpu.kernels import rounded as rounded_kernels
from headrace_kernels.gpu.kernels import softmax as softmax_kernels

LAUNCHERS = (attention, cache, draw, elementwise, recurrent, rounded, scans, softmax)
KERNELS = {
    attend_kernels: ["attend"],
    plan_kernels: ["plan"],
    cache_kernels: ["write_kv", "rope_write_kv", "write_part"],
    elementwise_kernels: ["rms_norm", "silu_mul", "rope_angles"],
    draw_kernels: ["draw_pieces", "decide"],
    recurrent_kernels: ["causal_conv", "delta_rule", "ssd", "selective_scan", "gated_rms_norm"],
    rounded_kernels: ["round_rows", "rounded_rms_norm", "rounded_silu_mul"],
    softmax_kernels: ["row_logsumexp"],
}

Seen = Callable[[tuple[object, ...]], None]


class RecordingKernel:
    """Replaces a kernel: records the constants of each launch that are part of Triton's compilation key."""

    def __init__(self, kernel: Any, seen: Seen) -> None:
        self._name = kernel.fn.__name__
        self._parameters = inspect.signature(kernel.fn)
        options = getattr(kernel, "kwargs", None) or {"do_not_specialize": kernel.do_not_specialize}
        self._free = set(options.get("do_not_specialize") or ())
        self._seen = seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **options: Any) -> None:
            names = self._parameters.parameters
            extra = {name: options.pop(name) for name in list(options) if name not in names}
            bound = self._parameters.bind(*arguments, **options).arguments
            key = [(name, self._constant(name, value)) for name, value in bound.items()]
            self._seen((self._name, *key, *sorted(extra.items())))

        return launch

    def _constant(self, name: str, value: object) -> object:
        if self._parameters.parameters[name].annotation is tl.constexpr:
            return str(value)
        if isinstance(value, Tensor):
            return str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0
        if isinstance(value, int) and name not in self._free:
            return value == 1, value % 16 == 0
        return type(value).__name__


def recorded_kernels(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """Every op calls the GPU's launcher; `seen` gets the name and the constants of each kernel that it launches."""
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, RecordingKernel(getattr(module, name), seen))

    def through(launcher: Callable[..., object], real: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            launcher(*arguments, **options)
            with _disable_current_modes():
                return real(*arguments, **options)

        return run

    for op in catalog.ALL:
        launcher = next((found for module in LAUNCHERS if (found := getattr(module, op.name, None))), None)
        if launcher is not None:
            monkeypatch.setattr(op, "_best_cpu", through(launcher, op.named(op.chosen("cpu"))))
