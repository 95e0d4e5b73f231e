"""Values that cannot work are refused when the chart is rendered, with a sentence that says what to change."""

import re
from typing import Any

import pytest

from support.helm.chart import RefusedError, changed

GPU = {"workers__serving": {"gpus": 8, "shm": "16Gi"}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"spec__models": [{"node_labels": {"headrace.dev/group": "servin"}}]},
            "the node_labels of smollm2 name the group 'servin', but workers has only serving: add the group",
        ),
        ({"workers__serving": None}, "workers has no group, so no replica could be placed: add one"),
        (
            GPU | {"spec__models": [{"source": "m", "tp": 16}]},
            "m needs 1 times 16 GPUs, each within one pod, but there is room for 0 in workers.serving: raise",
        ),
        (
            GPU | {"spec__models": [{"source": "m", "tp": 8}, {"source": "n", "tp": 4}]},
            "the models on workers.serving need 12 GPUs, but these pods have 8: raise replicas or gpus there",
        ),
        (
            {"workers__serving": {"gpus": 8, "shm": "512Mi"}, "spec__models": [{"source": "m", "tp": 2}]},
            "workers.serving.shm is 512Mi, but the 2 ranks of m communicate through it: set 1Gi or more",
        ),
        (
            {"extra__env": [{"name": "HF_HOME", "value": "/x"}]},
            "extra.env sets HF_HOME, which the chart sets itself",
        ),
        (
            {"workers__serving": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
            "workers.serving.resources.limits has nvidia.com/gpu, of which Ray would not know: set cpus, memory",
        ),
        (
            {"spec__models": [{"source": "/models/m", "cpu_share": 4}]},
            "no volume of the workers is mounted at the source /models/m: set models.existingClaim",
        ),
        (
            {"gateway": {"enabled": True, "parentRefs": [{"name": "g"}]}, "tls__existingSecret": "t"},
            "end TLS at the Gateway",
        ),
        ({"monitoring__podMonitor": True}, "monitoring.podMonitor needs networkPolicy.monitoring"),
        ({"spec__models": [{"device": "cuda"}]}, "smollm2 has device: cuda, but no group where it may run has GPUs"),
        (
            {"cache__enabled": True, "cache__accessMode": "ReadWriteOnce", "workers__serving": {"replicas": 2}},
            "cache.accessMode is ReadWriteOnce, but 2 worker pods share the cache: use ReadWriteMany",
        ),
        ({"gateway__enabled": True}, "gateway.enabled needs a Gateway: name it in gateway.parentRefs"),
        ({"tls__clientCa": True}, "tls.clientCa needs tls.existingSecret: name a Secret"),
        ({"admin__enabled": True}, "so it needs tls.existingSecret: name a Secret"),
        (
            {"tls": {"clientCa": True, "existingSecret": "a"}, "ingress__enabled": True},
            "tls.clientCa requires the client's own certificate, which an Ingress or Gateway does not pass on",
        ),
        ({"fullnameOverride": "a" * 41}, "has 41 characters, and names that KubeRay derives from it allow 40"),
    ],
)
def test_combinations_that_cannot_work(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(sentence)):
        changed(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(({f"spec__{path}": {}}, f"additional properties '{path}' not allowed") for path in ("ray", "auth")),
        *(
            ({f"spec__routers__{key}": 1}, f"at '/spec/routers': additional properties '{key}' not allowed")
            for key in ("host", "port", "shutdown_seconds")
        ),
        ({"spec__models": [{"tpp": 1}]}, "at '/spec/models/0': additional properties 'tpp' not allowed"),
        ({"routers": {}}, "additional properties 'routers' not allowed"),
        ({"workers": {"Serving": {}}}, "does not match pattern"),
        ({"workers__serving": {"cpus": 0.5}}, "/workers/serving/cpus"),
        ({"image__digest__router": "sha256:1"}, "/image/digest/router"),
        ({"router__leaveSeconds": 0}, "/router/leaveSeconds"),
    ],
)
def test_keys_that_the_schema_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(sentence)):
        changed(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec__models": [{"node_labels": {"headrace.dev/group": "!other"}}], "workers__other": {"cpus": 1}},
        {
            "spec__models": [{"node_labels": {"headrace.dev/group": "in(serving, other)"}}],
            "workers__other": {"cpus": 1},
        },
        {"spec__models": [{"replicas": 2, "cpu_share": 2}]},  # no second pod that could serve alone
        GPU | {"spec__models": [{"tp": 4, "replicas": 2}]},
        GPU | {"spec__models": [{"device": "cpu", "cpu_share": 4}]},
    ],
)
def test_combinations_that_work(changes: dict[str, Any]) -> None:
    assert changed(**changes)
