"""Defaults of a model's requests: from a flag, a variable or the file to each replica, and into the banner."""

from typing import Any

import msgspec
import pytest

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import config_digest
from headrace_cluster.errors import SpecError
from headrace_cluster.launch.banner import defaults_rows
from headrace_cluster.ray.calls import RayCalls
from headrace_cluster.ray.driver import RayDriver
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.members import MEMBER


def _config(spec: ClusterSpec, place: int = 0) -> ReplicaConfig:
    """The config of a rank, after encoding and decoding."""
    model = spec.models[place]
    driver = RayDriver(spec, MEMBER.secret, RayCalls(), "127.0.0.1")
    sent = driver._config(ReplicaName(f"{model.name}-0", 1), model, Role.BOTH, threads=1)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=ReplicaConfig)
    assert config_digest(received, 0) == config_digest(sent, 0)
    return received


def test_each_model_has_its_own_defaults() -> None:
    first = {"source": "a/one", "defaults": {"max_tokens": 300, "temperature": 1, "top_k": -1}}
    spec = parse_spec({"models": [first, {"source": "/b/two.gguf"}]})
    assert _config(spec).defaults == {"max_tokens": 300, "temperature": 1.0, "top_k": 0}
    assert _config(spec, 1).defaults == {}
    assert ClusterSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_replica_with_other_defaults_is_not_adopted() -> None:
    plain, warm = parse_spec({}), parse_spec({"models": [{"defaults": {"temperature": 0.5}}]})
    assert config_digest(_config(plain), 0) != config_digest(_config(warm), 0)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"max_token": 5}, "unknown key 'models[0].defaults.max_token'"),
        ({"max_tokens": 0}, "models[0].defaults.max_tokens: Input should be greater than or equal to 1, not 0"),
        ({"temperature": float("nan")}, "models[0].defaults.temperature"),
        ({"frequency_penalty": "0.5"}, "models[0].defaults.frequency_penalty"),
        ("max_tokens=5", 'models[0].defaults: write it as a JSON object, such as {"max_tokens": 512'),
        ("[5]", "models[0].defaults: write it as a JSON object"),
    ],
)
def test_wrong_defaults_are_rejected_with_their_field(defaults: Any, words: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_spec({"models": [{"defaults": defaults}]})
    assert words in str(raised.value) and "\n" not in str(raised.value)


def _started(model: str, defaults: dict[str, int | float]) -> ReplicaStarted:
    names = "pid threads max_model_len max_num_seqs max_num_batched_tokens kv_blocks kv_bytes block_size weight_bytes"
    numbers: dict[str, Any] = dict.fromkeys(names.split(), 1)
    others: dict[str, Any] = {"boot_id": b"", "device": "cpu", "dtype": "float32", "notes": []}
    return ReplicaStarted(model=model, address="127.0.0.1:1", defaults=defaults, revision="", **numbers, **others)


def test_the_banner_shows_defaults_once_per_model() -> None:
    defaults: dict[str, int | float] = {"max_tokens": 2147483647, "temperature": 0.0, "top_p": 0.9}
    some, a, b = (_started(model, defaults) for model in ("tiny", "x/m", "y/m"))
    none = _started("c", {})
    words = "max_tokens 2147483647, temperature 0, top_p 0.9  (a request's own values override them)"
    assert defaults_rows({"tiny-0": some, "tiny-1": some}) == [("defaults", words)]
    rows = [("defaults", f"x/m: {words}"), ("", f"y/m: {words}")]
    assert defaults_rows({"m-0": a, "m-1": b, "c-0": none}) == rows
    assert defaults_rows({"tiny-0": none}) == []
