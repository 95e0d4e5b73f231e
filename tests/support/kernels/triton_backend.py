"""The Triton backend on the machine of the tests: on its GPU, or in Triton's interpreter."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_kernels import catalog
from headrace_kernels.gpu import availability


def _plain_product(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """The interpreter's tl.dot with a device's property: a row's result does not depend on its place. A BLAS uses
    another order of addition per row, which has no effect once sums in float64 are rounded.
    """
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return type(d)(product + d.data, d.dtype.scalar)


def _interpret() -> None:
    """Loads the Triton kernels for the interpreter.

    Triton selects it when a function is decorated. Another package's import may have loaded Triton before, so its own
    library is decorated again. The variable is restored: processes of other packages' tests are not affected.
    """
    before = os.environ.get(availability.INTERPRET)
    os.environ[availability.INTERPRET] = "1"
    availability.interpreted.cache_clear()
    availability.missing.cache_clear()
    try:
        if not availability.interpreted() or availability.missing() is not None:
            return
        import triton
        import triton.experimental.gluon  # Triton imports it late, and it must be imported with the interpreter enabled
        from triton.runtime import interpreter
        from triton.runtime.jit import JITFunction

        for module in (triton.language, triton.language.standard):
            for name, member in list(vars(module).items()):
                if isinstance(member, JITFunction):
                    setattr(module, name, triton.jit(member.fn))
        interpreter.InterpreterBuilder.create_dot = _plain_product
        for op in catalog.ALL:
            if "triton" in op.available():
                op.named("triton")
        from headrace_kernels.gpu import attention

        attention._PIECES = attention._LONG_PIECES = (
            16  # the interpreter takes a millisecond for a program that has nothing to do
        )
    finally:
        if before is None:
            del os.environ[availability.INTERPRET]
        else:
            os.environ[availability.INTERPRET] = before


class _OnGpu:
    """A backend's function, run on copies of CPU tensors on the GPU; its writes are copied back."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        storages: dict[int, tuple[Any, Any]] = {}

        def to_gpu(x: Any) -> Any:
            if dataclasses.is_dataclass(x) and not isinstance(x, type):  # the meta of a step, options of rows
                return type(x)(*(to_gpu(getattr(x, entry.name)) for entry in dataclasses.fields(x) if entry.init))
            if not isinstance(x, Tensor):
                return x
            storage = x.untyped_storage()
            copy = storages.setdefault(storage.data_ptr(), (storage, storage.cuda()))[1]
            return torch.empty(0, dtype=x.dtype, device="cuda").set_(copy, x.storage_offset(), x.shape, x.stride())

        result = self._run(*map(to_gpu, arguments), **{name: to_gpu(x) for name, x in options.items()})
        for storage, copy in storages.values():
            storage.copy_(copy)
        return _to_cpu(result)


def _to_cpu(x: Any) -> Any:
    """A tensor, or results that have some."""
    if isinstance(x, tuple) and type(x) is tuple:
        return tuple(map(_to_cpu, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x)(*(_to_cpu(getattr(x, entry.name)) for entry in dataclasses.fields(x)))
    return x.cpu() if isinstance(x, Tensor) else x


def run_triton_here() -> None:
    """Lets tests pass CPU tensors to the Triton backend, which runs on the GPU if there is one."""
    if not torch.cuda.is_available():
        _interpret()
        return
    named = catalog.WRITE_KV.__class__.named

    def named_on_gpu(op: Any, name: str) -> Any:
        return _OnGpu(named(op, name)) if name == "triton" else named(op, name)

    setattr(catalog.WRITE_KV.__class__, "named", named_on_gpu)  # noqa: B010
