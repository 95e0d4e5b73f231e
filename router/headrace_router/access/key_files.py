"""API keys and metrics keys, read again when their files change."""

import asyncio
from collections.abc import Callable

from headrace_router.access import watched_files
from headrace_router.access.auth import AuthConfig, Keys
from headrace_router.access.watched_files import WatchedFiles


class KeyFiles:
    """The keys of both kinds. One file that cannot be used keeps its earlier keys, and delays nothing in the other."""

    def __init__(self, config: AuthConfig) -> None:
        """Raises KeysFileError, PrivateFileError.

        A file must have a key at first; it may lose its last one later, which is revoked like any other, but it has a
        comment then: a file that is blank may be half written, and is not used.
        """
        running = False
        self._api = WatchedFiles(
            "API keys",
            (config.keys_file,),
            lambda: config.load(may_have_none=running),
            lambda keys: Keys(keys, self._metrics.current).check_apart(),
        )
        self._metrics = WatchedFiles(
            "metrics keys",
            (config.metrics_key_file,),
            lambda: config.load_metrics(may_have_none=running),
            lambda keys: Keys(self._api.current, keys).check_apart(),
        )
        self.current.check_apart()
        running = True

    @property
    def current(self) -> Keys:
        """What is in use."""
        return Keys(self._api.current, self._metrics.current)

    async def watch(self, use: Callable[[Keys], None]) -> None:
        """Until it is cancelled. use: gets the keys when some have changed."""
        while True:
            await asyncio.sleep(watched_files.RELOAD_SECONDS)
            if self.refresh():
                use(self.current)

    def refresh(self) -> bool:
        """Reads each file if it changed, and returns whether there are other keys in use; logs as `WatchedFiles`."""
        changed = [watched.refresh() for watched in (self._api, self._metrics)]
        return any(changed)
