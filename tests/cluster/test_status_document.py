"""The document of `headrace status --json`, whatever replicas report."""

import json
from typing import Any

import pytest

from headrace_cluster.cli.status import placement_lines
from headrace_cluster.controller.status import build_status, router_status
from headrace_cluster.core.record import Record
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto import control_pb2
from headrace_proto.replica_pb2 import Load, ReplicaHealth
from headrace_proto.role import Role


@pytest.mark.parametrize("usage", [float("nan"), float("inf"), -float("inf"), 0.25])
def test_numbers_that_json_does_not_have(usage: float) -> None:
    record: Any = Record("m-0", ModelSpec(name="m"), Role.BOTH)
    document = build_status(record, ReplicaHealth(load=Load(running=1, kv_usage=usage)), "")
    assert json.loads(json.dumps(document, allow_nan=False))["load"]["kv_usage"] == (0.25 if usage == 0.25 else 0.0)


def test_how_a_router_places_requests_is_shown() -> None:
    placed = control_pb2.ModelPlacement(
        model="m", policy="predicted", prompt_tokens=200, cached_tokens=150, placements=8, cache_placements=6,
        unknown_caches={"m-1": "its events are missing"},
    )  # fmt: skip
    idle = control_pb2.ModelPlacement(model="n", policy="predicted")
    document = router_status(control_pb2.RouterInfo(id="r-1"), "", [placed, idle])
    assert [line for entry in document["placement"] for line in placement_lines(entry)] == [
        "m: placed by predicted, 75% of prompt tokens cached, 6 of 8 placements followed a cache",
        "m: the KV blocks of m-1 are not known: its events are missing",
        "n: placed by predicted, no request yet",
    ]
