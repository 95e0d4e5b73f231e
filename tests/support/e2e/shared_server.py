"""The server that most tests of e2e/ share runs from the first of these tests to the last.

It then takes no core and no memory from the tests that start servers of their own.
"""

from pathlib import Path

import pytest

from support.e2e.headrace_process import Serve

SERVER = pytest.StashKey[Serve]()
LAST_TEST = pytest.StashKey[str]()
FIXTURE = "server"


def uses_server(item: pytest.Item) -> bool:
    return FIXTURE in getattr(item, "fixturenames", ())


def sort_sharing_files_first(items: list[pytest.Item], folder: Path) -> None:
    """Sorts the tests of the folder, in place: files with a test that shares the server come first, each as a whole."""
    sharing = {item.path for item in items if uses_server(item)}
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(folder)]
    in_order = sorted((items[place] for place in places), key=lambda item: item.path not in sharing)
    for place, item in zip(places, in_order, strict=True):
        items[place] = item


def record_last_test(session: pytest.Session) -> None:
    """Call when the tests to run are known."""
    session.config.stash[LAST_TEST] = next((i.nodeid for i in reversed(session.items) if uses_server(i)), "")


def stop_after_last_test(item: pytest.Item) -> None:
    if item.nodeid == item.config.stash[LAST_TEST] and (serve := item.config.stash.get(SERVER, None)):
        serve.close()
