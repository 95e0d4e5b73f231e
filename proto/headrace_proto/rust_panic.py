"""Panics of libraries written in Rust (tokenizers): an exception that is no Exception would end tasks and threads."""

from collections.abc import Iterator
from contextlib import contextmanager


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
