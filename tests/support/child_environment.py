"""The environment of processes that tests start and that import this package."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the folder of `support` on the module search path."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path} | changes
