"""Selects the backend of a call: every op has an ordered list of backends, and the best available one for the device of
the call's tensors is selected, call by call: CPU tensors use the C++ one on a machine with a GPU too.

A backend is available or not on this machine (a compiler, a GPU, a switched-off environment variable); beyond that it
may support only some calls (dtype, device, head size). The last backend of every op is the torch reference, which is
always available and supports all calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Run = TypeVar("Run", bound=Callable[..., object])


class KernelBackendError(RuntimeError):
    """A backend was requested by a name that does not exist or is not available here."""


@dataclass(frozen=True, slots=True)
class Backend(Generic[Run]):
    """One implementation of an op. ``missing`` returns a sentence why it cannot run here (None = it can)."""

    name: str
    load: Callable[[], Run]
    missing: Callable[[], str | None] = lambda: None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})  # devices of the tensors it is selected for


class Op(Generic[Run]):
    """An op and its backends, best first. Backends are loaded when they are first used."""

    def __init__(self, name: str, *backends: Backend[Run]) -> None:
        self.name = name
        self._backends = backends
        self._loaded: dict[str, Run] = {}
        self._best_cpu: Run | None = None
        self._best_cuda: Run | None = None

    def best(self, tensor: Tensor) -> Run:
        """The function of the best available backend for a tensor's device."""
        if tensor.is_cuda:
            if self._best_cuda is None:
                self._best_cuda = self.named(self.chosen("cuda"))
            return self._best_cuda
        if self._best_cpu is None:
            self._best_cpu = self.named(self.chosen("cpu"))
        return self._best_cpu

    def chosen(self, device: str) -> str:
        """Name of the best available backend for tensors on a device, "cpu" or "cuda"."""
        fits = (backend for backend in self._backends if device in backend.devices)
        return next(backend.name for backend in fits if backend.missing() is None)

    def available(self) -> list[str]:
        """Names of all backends that can run here."""
        return [backend.name for backend in self._backends if backend.missing() is None]

    def named(self, name: str) -> Run:
        """The function of one backend by name; raises KernelBackendError if it is unknown or cannot run here."""
        if name in self._loaded:
            return self._loaded[name]
        for backend in self._backends:
            if backend.name == name:
                if reason := backend.missing():
                    raise KernelBackendError(f"The {name} backend of {self.name} cannot run here: {reason}")
                return self._loaded.setdefault(name, backend.load())
        known = ", ".join(backend.name for backend in self._backends)
        raise KernelBackendError(f"{self.name} has no backend named {name}; it has {known}.")
