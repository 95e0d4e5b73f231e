"""The document of `headrace status --json`, whatever replicas report."""

import json
from typing import Any

import pytest

from headrace_cluster.controller.status import build_status
from headrace_cluster.core.record import Record
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.replica_pb2 import Load, ReplicaHealth
from headrace_proto.role import Role


@pytest.mark.parametrize("usage", [float("nan"), float("inf"), -float("inf"), 0.25])
def test_numbers_that_json_does_not_have(usage: float) -> None:
    record: Any = Record("m-0", ModelSpec(name="m"), Role.BOTH)
    document = build_status(record, ReplicaHealth(load=Load(running=1, kv_usage=usage)), "")
    assert json.loads(json.dumps(document, allow_nan=False))["load"]["kv_usage"] == (0.25 if usage == 0.25 else 0.0)
