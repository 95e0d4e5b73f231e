"""The JSON schema of the spec, as `headrace config schema` prints it."""

import json
from typing import Any

from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.flag import POOL


def spec_schema() -> dict[str, Any]:
    """Beside the keys of JSON Schema, a setting has `flag`: one or several, with commas, and `help`."""
    schema = ClusterSpec.model_json_schema()
    sections: dict[str, Any] = schema["$defs"]
    for name, section in sections.items():
        for field in section["properties"].values():
            if POOL in field.get("flag", ""):
                holders = _holders(sections, name)
                field["flag"] = ", ".join(field["flag"].replace(POOL, holder) for holder in holders)
                field["help"] = field["help"].replace(POOL, " or ".join(holders))
    return schema


def _holders(sections: dict[str, Any], name: str) -> list[str]:
    """The fields that hold this section: the names of its pools."""
    reference = json.dumps({"$ref": f"#/$defs/{name}"})
    fields = (entry for section in sections.values() for entry in section["properties"].items())
    return [holder for holder, field in fields if reference in json.dumps(field)]
