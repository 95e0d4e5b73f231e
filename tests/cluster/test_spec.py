"""The spec: what is accepted, and the errors of what is not."""

from pathlib import Path
from typing import Any

import pytest
from ray._private.label_utils import validate_label_selector

from headrace_cluster.errors import SpecError
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_cluster.spec.model_spec import Pool, default_name
from headrace_cluster.spec.section import parse_bytes
from headrace_proto.role import Role


def test_an_empty_spec_serves_the_embedded_model() -> None:
    spec = parse_spec({})
    assert [(model.name, model.source, model.replicas) for model in spec.models] == [("smollm2", "smollm2", 1)]
    assert (spec.routers.host, spec.routers.port, spec.routers.grpc_port, spec.admin.port) == (
        "127.0.0.1",
        8000,
        8001,
        8002,
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/data/models/my model/", "my-model"),
        ("./weights/tiny.Q4_1.gguf", "tiny.Q4_1"),
        ("/data/large-Q8_0-00001-of-00003.gguf", "large-Q8_0"),
    ],
)
def test_a_model_is_named_after_its_source(source: str, name: str) -> None:
    assert default_name(source) == name


def test_a_relative_folder_is_named_like_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert default_name("a/b") == "b"


@pytest.mark.parametrize(
    ("data", "ports"),
    [
        ({}, ()),
        ({"routers": {"count": 3}}, (8003, 8004, 8005)),
        ({"routers": {"count": 2}, "admin": {"port": 9002}}, (9003, 9004)),
        ({"routers": {"count": 2}, "admin": {"port": 7999}}, (8002, 8003)),
        ({"routers": {"count": 2}, "admin": {"port": 0}}, (0, 0)),
        ({"routers": {"count": 2, "metrics_port": 0}}, (0, 0)),
        ({"routers": {"metrics_port": 9100}}, (9100,)),
        ({"routers": {"metrics_no_auth": True}}, (8003,)),
        ({"routers": {"metrics_host": "127.0.0.2"}}, (8003,)),
    ],
)
def test_metrics_ports_are_known_before_a_start(data: dict[str, Any], ports: tuple[int, ...]) -> None:
    """They start at the first port above the admin port that is no other port of the cluster."""
    assert parse_spec(data).metrics_ports == ports


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"routers": {"count": 0}}, "routers.count"),
        ({"routers": {"count": 3, "port": 9001, "metrics_port": 9000}}, "port 9001 is given twice"),
        ({"routers": {"count": 3, "metrics_port": 65534}}, "3 routers need that many"),
        ({"model": []}, "unknown key 'model' (see "),
        ({"models": [{"sorce": "x"}]}, "unknown key 'models[0].sorce' (see "),
        ({"models": []}, "models"),
        ({"models": [{"tp": 0}]}, "models[0].tp"),
        ({"models": [{"kv_cache_memory": "lots"}]}, "2GiB"),
        ({"models": [{"dtype": "int3"}]}, "models[0].dtype"),
        ({"models": [{}, {}]}, "'smollm2' is given twice"),
        ({"routers": {"port": 70000}}, "routers.port"),
        ({"routers": {"port": 8002}}, "port 8002 is given twice"),
        ({"admin": {"host": "0.0.0.0"}}, "admin.host"),
        ({"limits": {"no": 1}}, "unknown key 'limits.no'"),
        ({"cluster": "Not A Name"}, "cluster"),
        ({"models": [{"prefill": {}}]}, "prefill is given without decode"),
        ({"models": [{"decode": {"replicas": 2}}]}, "decode is given without prefill"),
        ({"models": [{"prefill": {}, "decode": {}, "replicas": 2}]}, "replicas is given beside prefill and decode"),
        ({"models": [{"prefill": {"replicas": 0}, "decode": {}}]}, "models[0].prefill.replicas"),
        ({"models": [{"prefill": {}, "decode": {"tp": 0}}]}, "models[0].decode.tp"),
        ({"models": [{"prefill": {"dp": 1}, "decode": {}}]}, "unknown key 'models[0].prefill.dp'"),
        ({"models": [{"prefill": {"tp": 1}, "decode": {}, "tp": 2, "ep": True}]}, "ep"),
        ({"models": [{"kv_offload_dir": "/cache"}]}, "evicted KV blocks go to disk through host memory"),
        ({"models": [{"kv_offload_memory": "1GiB", "kv_offload_dir_size": "9GiB"}]}, "give kv_offload_dir and"),
        ({"models": [{"cpu_arithmetic": "bf16", "dtype": "float16"}]}, "cpu_arithmetic bf16 is for CPUs"),
        ({"models": [{"quantization": "awq"}]}, "the format of another is read from its config.json: leave it out"),
        ({"models": [{"port_range": "20100-20000"}]}, "write a range of ports like 20000-20100"),
        ({"models": [{"port_range": "0-9"}]}, "write a range of ports like 20000-20100"),
        ({"admin": {"host": "0.0.0.0"}}, "admin.host 0.0.0.0 is open to others: give their key with admin.key_file"),
    ],
)
def test_a_wrong_spec_is_rejected_with_its_field(data: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec(data)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_key_is_not_repeated_in_the_message() -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec({"auth": {"keys": ["tiny s3cret"]}})
    assert "s3cret" not in str(raised.value)


def test_the_spec_is_equal_after_json() -> None:
    spec = parse_spec({"models": [{"source": "smollm2", "kv_cache_memory": "1.5GiB"}], "ray": {"address": "auto"}})
    assert spec.models[0].kv_cache_memory == 3 << 29
    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec
    pools = parse_spec({"models": [{"prefill": {"tp": 2}, "decode": {"replicas": 2}}]})
    assert ClusterSpec.model_validate_json(pools.model_dump_json()) == pools


def test_pools_have_the_labels_of_the_model_or_their_own() -> None:
    pools = {"prefill": {"node_labels": {"gpu": "h100"}}, "decode": {}}
    (model,) = parse_spec({"models": [{"node_labels": {"zone": "in(a, b)"}} | pools]}).models
    assert [dict(pool.node_labels) for pool in model.pools] == [{"zone": "in(a, b)"}, {"gpu": "h100"}]
    assert model.shaped(model.pools[1]).node_labels == {"gpu": "h100"}
    (plain,) = parse_spec({"models": [{}]}).models
    assert plain.node_labels == {} and dict(plain.pools[0].node_labels) == {}


@pytest.mark.parametrize(
    "labels", [{"a b": "c"}, {"-a": "c"}, {"a": "b;c"}, {"a": "in()"}, {"a": ""}, {"a": "in(a"}, "x", "[1]"]
)
def test_labels_that_ray_would_refuse(labels: object) -> None:
    with pytest.raises(SpecError, match="node_labels"):
        parse_spec({"models": [{"node_labels": labels}]})


@pytest.mark.parametrize("labels", [{"ray.io/node-id": "abc"}, {"a": "!b"}, {"a": "in(b,c)"}, {"a": "!in(b, c)"}])
def test_labels_as_ray_takes_them(labels: dict[str, str]) -> None:
    assert validate_label_selector(labels) is None
    assert parse_spec({"models": [{"node_labels": labels}]}).models[0].node_labels == labels


def test_pools_have_the_models_shape_unless_they_have_their_own() -> None:
    data = {"tp": 2, "pp": 3, "prefill": {"replicas": 4, "pp": 1}, "decode": {"tp": 1}}
    (model,) = parse_spec({"models": [data]}).models
    assert model.pools == (Pool(Role.DECODE, 1, 1, 3), Pool(Role.PREFILL, 4, 2, 1))
    assert [pool.ranks for pool in model.pools] == [3, 8]
    shaped = model.shaped(model.pools[1])
    assert (shaped.tp, shaped.pp, shaped.ranks, shaped.pools) == (2, 1, 2, (Pool(Role.BOTH, 1, 2, 1),))
    (plain,) = parse_spec({"models": [{"replicas": 3, "tp": 2}]}).models
    assert plain.pools == (Pool(Role.BOTH, 3, 2, 1),)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("2GiB", 2 << 30), ("512M", 512_000_000), ("1.5 kib", 1536), ("7b", 7), ("2Gi", 2 << 30)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 GiBs", "nan"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_bytes(text)
