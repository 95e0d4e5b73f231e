"""Files that are read again when they change."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from headrace_base.errors import HeadraceError

RELOAD_SECONDS = 1.0  # between two looks at the files

T = TypeVar("T")

log = structlog.get_logger("headrace.files")


class WatchedFiles(Generic[T]):
    """What some files hold. `watch` replaces it when they change, unless it cannot be used."""

    def __init__(
        self,
        name: str,
        paths: Sequence[Path | None],
        load: Callable[[], T],
        check: Callable[[T], None] = lambda loaded: None,
    ) -> None:
        """name: of the files in the log. check: raises for changed files that are not to be used. Raises as `load`."""
        self._name = name
        self._paths = paths
        self._load = load
        self._check = check
        self._seen = self._refused = self._version()
        self.current = load()

    async def watch(self, use: Callable[[T], None] | None = None) -> None:
        """Until it is cancelled. use: gets what is loaded."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            if self.refresh() and use is not None:
                use(self.current)

    def refresh(self) -> bool:
        """Reads the files if they changed, and returns whether what was loaded is in use.

        What cannot be used is logged, and what was loaded before stays in use.
        """
        version = self._version()
        if version == self._seen:
            return False
        try:
            loaded = self._load()
            self._check(loaded)
        except (HeadraceError, OSError) as error:  # it is tried again: the cause may be a lack of descriptors
            if version != self._refused:
                log.warning(f"the {self._name} changed and are not used: {error}; the earlier ones stay in use")
            self._refused = version
            return False
        except Exception:  # a bug of ours must not end the watch
            if version != self._refused:
                log.exception(f"the {self._name} changed and cannot be read; the earlier ones stay in use")
            self._refused = version
            return False
        self._seen, self.current = version, loaded
        log.info(f"the {self._name} changed and are in use")
        return True

    def _version(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_file_version, self._paths))


def _file_version(path: Path | None) -> tuple[int, ...]:
    """Changes with the file, and with the file that a link names; empty without one."""
    if path is None:
        return ()
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
