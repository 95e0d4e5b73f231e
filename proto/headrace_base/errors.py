"""The base of every error that Headrace raises on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager


def counted(count: int, noun: str) -> str:
    """'1 GPU', '2 GPUs': for nouns with a plural in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(count: int) -> str:
    """For people: '1.50 GiB', '12.0 MiB'."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


class RustPanicError(RuntimeError):
    """A library written in Rust panicked: an error in the library, or data that it does not check."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raises RustPanicError for a panic, which pyo3 raises as a BaseException of a module that cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise RustPanicError(str(error)[:200]) from error
        raise


class HeadraceError(Exception):
    """An error with a sentence on what is wrong and what the user can do; shown without a stack trace."""


class ModelSourceError(HeadraceError):
    """The MODEL argument names no model that can be loaded."""


class ModelUnsupportedError(HeadraceError):
    """The model was found, but this build cannot run it; the sentence names the feature."""


class ModelLoadError(HeadraceError):
    """Weights are missing, corrupt or do not fit the model's config."""


class MemoryTooSmallError(HeadraceError):
    """Weights and the smallest useful KV cache do not fit into the memory that is free."""


class DeviceError(HeadraceError):
    """The requested device or dtype is not available here."""


class ListenError(HeadraceError):
    """An address cannot be bound."""


class EngineDeadError(HeadraceError):
    """The step loop has ended; the replica cannot serve requests any more."""
