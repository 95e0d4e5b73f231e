"""Labels that a node of Ray must have for a rank to be placed there."""

import re
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from headrace_cluster.spec.json_object import json_object

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:[A-Za-z0-9][A-Za-z0-9.-]{{0,252}}/)?{_PART}")
_VALUE = re.compile(rf"!?(?:{_PART}|in\({_PART}(?:, ?{_PART})*\))")


def _checked(labels: dict[str, str]) -> dict[str, str]:
    """Ray's syntax of a label selector, https://docs.ray.io/en/latest/ray-core/scheduling/labels.html."""
    for key, value in labels.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:80]!r} is no name of a label, such as accelerator or example.com/pool")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{value[:80]!r} is no value of a label: write it as h100, !h100 or in(h100, h200)")
    return labels


_mapping = partial(json_object, example='{"gpu": "h100"}')
NodeLabels = Annotated[dict[str, str], BeforeValidator(_mapping), AfterValidator(_checked)]
