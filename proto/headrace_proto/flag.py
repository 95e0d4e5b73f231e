"""The command-line flag of a setting, on the field that declares it. Read by `headrace_cluster.spec.flag`."""

from typing import Any


def flag(name: str, *, help: str = "", values: str = "", short: str = "") -> dict[str, Any]:
    """For `json_schema_extra`. `help`: instead of the description; `values`: how its values are written."""
    given = {"flag": name, "help": help, "values": values, "short": short}
    return {key: value for key, value in given.items() if value}
