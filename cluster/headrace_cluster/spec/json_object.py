"""A setting that is a mapping: in a file as such, as a flag or an environment variable as JSON text."""

import json


def json_object(value: object, example: str) -> object:
    """The mapping of a JSON text; another value as it is. Raises ValueError with the example."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"write it as a JSON object, such as {example}")
    return parsed
