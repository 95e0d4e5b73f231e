"""Checks that end a start before Ray: each case in this process, with its sentence, and without torch."""

import dataclasses
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace_base.errors import HeadraceError
from headrace_base.private_file import PrivateFileError
from headrace_cluster.core.rank_config import replica_config
from headrace_cluster.launch import start_checks
from headrace_cluster.launch.start_checks import Machine, check_local, check_models, check_room, check_start
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_worker.model.source import HubUnreachableError, ModelSource, resolve

PLAIN = Machine(cores=2, memory=16 << 30, gpus=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder, created without torch; only its headers are valid."""
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (made / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((1024, 256), np.float32)}, made / "model.safetensors")
    return made


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "this_machine", lambda: PLAIN)


def spec(*models: dict[str, Any], **fields: Any) -> ClusterSpec:
    ports = {"routers": {"port": 0, "grpc_port": 0}, "admin": {"port": 0}}
    return parse_spec(ports | {"models": list(models)} | fields)


def run(cluster_spec: ClusterSpec) -> list[str]:
    """Runs the checks and returns the warnings."""
    warnings: list[str] = []
    check_start(cluster_spec, warnings.append, with_router=True)
    return warnings


def rejection(cluster_spec: ClusterSpec) -> str:
    with pytest.raises(HeadraceError) as caught:
        run(cluster_spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_cache_memory": "500GiB"}, ("500.34 GiB", "16.00 GiB are free", "--kv-cache-memory 16")),
        ({"max_model_len": 8193}, ("--max-model-len 8193", "8192 positions")),
        ({"replicas": 60, "cpu_share": 0.01}, ("60 replicas", "--replicas 4")),
        ({"replicas": 41}, ("41 ranks", "2.05 CPUs", "--cpu-share")),
        ({"chat_template": "/none.jinja"}, ("--chat-template", "No such file")),
        ({"device": "cuda"}, ("1 GPU is needed", "this machine has none", "--device cpu")),
        ({"dtype": "bfloat16", "deterministic": True}, ("--deterministic", "bfloat16")),
    ],
)
def test_rejected_options_of_the_embedded_model(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    sentence = rejection(spec(fields))
    assert all(word in sentence for word in words), sentence


def test_a_revision_of_the_hub_is_pinned_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that moves while ranks start, or before one is repaired, is no other model for them."""
    commits = iter(["first", "second", "third"])

    def resolve_fake(source: str, load_format: str, revision: str | None) -> ModelSource:
        found = resolve(str(folder), load_format)
        return found if source != "acme/model" else dataclasses.replace(found, commit=revision or next(commits))

    monkeypatch.setattr(start_checks, "resolve", resolve_fake)
    models = ({"source": "acme/model", "name": "hub", "tp": 2}, {"source": str(folder), "name": "local"})
    pinned = check_start(spec(*models), print, with_router=False)
    assert [model.revision for model in pinned.models] == ["first", None]
    assert replica_config(pinned.models[0], replica_id="r").revision == "first"
    assert check_start(pinned, print, with_router=False) == pinned


def test_the_error_names_a_damaged_file_and_with_several_models_the_model(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert rejection(spec({"source": str(folder)})).startswith("model.safetensors is not a complete")
    both = rejection(spec({"name": "good"}, {"source": str(folder), "name": "bad"}))
    assert both.startswith("bad: model.safetensors")


def test_a_family_that_is_not_served_is_named_before_ray_starts(folder: Path) -> None:
    """Wherever models are checked: at a start, by a controller, and for `apply` and `rollout --set`."""
    config = {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}
    (folder / "config.json").write_text(json.dumps(config))
    models = ({"name": "good"}, {"source": str(folder), "name": "bad"})
    assert rejection(spec(*models)).startswith("bad: The checkpoint is quantized by hqq, which is not served")
    for check in (check_local, check_models):
        with pytest.raises(HeadraceError, match="bad: The checkpoint is quantized"):
            check(spec(*models), print)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    assert "--trust-remote-code" in rejection(spec({"source": str(folder)}))
    assert run(spec({"source": str(folder), "trust_remote_code": True})) == []


def test_an_invalid_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 200)
    assert "model.gguf has GGUF version" in rejection(spec({"source": str(path)}))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(200))
    assert "damaged" in rejection(spec({"source": str(path)}))


def test_a_missing_part_of_a_gguf_model(tmp_path: Path) -> None:
    for part in (1, 3):
        (tmp_path / f"m-0000{part}-of-00003.gguf").write_bytes(b"GGUF" + bytes(200))
    for source in (tmp_path, tmp_path / "m-00001-of-00003.gguf"):
        assert "'m' part 2 of 3 is missing" in rejection(spec({"source": str(source)}))


def test_weights_count_in_the_dtype_of_the_computation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB of float32 on disk is a MiB in memory, or half of it."""
    tight = Machine(cores=2, memory=(256 << 20) + (1 << 20) - 1, gpus=0)
    monkeypatch.setattr(start_checks, "this_machine", lambda: tight)
    assert "the ranks need" in rejection(spec({"source": str(folder), "dtype": "float32"}))
    run(spec({"source": str(folder), "dtype": "bfloat16"}))


def test_on_gpus_the_hosts_memory_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "this_machine", lambda: Machine(2, 1 << 20, 4))
    assert run(spec({"source": str(folder), "tp": 2, "replicas": 2})) == []
    assert "5 GPUs are needed" in rejection(spec({"source": str(folder), "replicas": 5}))
    monkeypatch.setattr(start_checks, "this_machine", lambda: Machine(2, 16 << 30, None))
    assert run(spec({"source": str(folder), "device": "cuda"})) == [], "Ray checks GPUs that cannot be counted here"


def test_resources_of_a_joined_ray_are_not_checked_here(folder: Path) -> None:
    far = {"ray": {"address": "192.0.2.55:6379"}}
    assert run(spec({"source": str(folder), "replicas": 100, "device": "cuda"}, **far)) == []
    assert run(spec({"source": str(folder), "kv_cache_memory": "500GiB"}, **far)) == []
    assert "8192 positions" in rejection(spec({"max_model_len": 8193}, **far))


def test_changes_of_a_server_on_this_machine_are_checked_here(folder: Path) -> None:
    here = {"ray": {"address": "127.0.0.1:6379"}}  # as the controller of `serve` has it
    check_room(spec({"source": str(folder), "replicas": 40}, **here))
    with pytest.raises(HeadraceError, match="41 ranks"):
        check_room(spec({"source": str(folder), "replicas": 41}, **here))
    with pytest.raises(HeadraceError, match="this machine has none"):
        check_room(spec({"source": str(folder), "device": "cuda"}, **here))
    assert check_local(spec({"source": str(folder)}, **here), print).models[0].source == str(folder)
    with pytest.raises(HeadraceError, match="There is no model at"):
        check_local(spec({"source": "/missing"}, **here), print)


def test_weights_of_other_machines_are_not_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_download(*_: object) -> ModelSource:
        raise AssertionError("this machine may run no rank")

    def commit(source: str, revision: str | None) -> str | None:
        return f"commit of {revision}" if source == "acme/model" else None

    monkeypatch.setattr(start_checks, "resolve", no_download)
    monkeypatch.setattr(start_checks, "hub_commit", commit)
    models = [
        {"source": "acme/model", "name": "hub", "revision": "main"},
        {"source": "/only/there", "name": "path"},
        {"source": "~/model.gguf", "name": "file"},
    ]
    pinned = check_start(spec(*models, ray={"address": "192.0.2.55:6379"}), print, with_router=False)
    assert [model.revision for model in pinned.models] == ["commit of main", None, None]

    def unreachable(source: str, revision: str | None) -> str | None:
        raise HubUnreachableError("The Hugging Face Hub cannot be reached.")

    monkeypatch.setattr(start_checks, "hub_commit", unreachable)
    warnings: list[str] = []
    far = spec(models[0], ray={"address": "192.0.2.55:6379"})
    (model,) = check_start(far, warnings.append, with_router=False).models
    assert model.revision == "main" and "cannot be reached" in warnings[0] and "keeps its commit" in warnings[0]


def test_more_ranks_or_threads_than_cores_are_warnings(folder: Path) -> None:
    assert run(spec({"source": str(folder), "replicas": 3})) == [
        "3 ranks share 2 cores: together they answer no faster than 2 would"
    ]
    assert run(spec({"source": str(folder), "cpu_threads": 999})) == [
        "tiny: 999 threads of a rank share 2 cores, which is slower than 2 threads; lower --cpu-threads"
    ]


@pytest.mark.parametrize("name", ["keys_file", "metrics_key_file"])
def test_keys_that_other_users_can_read_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-of-some-length\n")
    cluster_spec = spec({}, auth={name: str(file)})
    file.chmod(0o640)
    with pytest.raises(PrivateFileError, match=f"can read it: chmod 600 {file}"):
        run(cluster_spec)
    file.chmod(0o600)
    assert run(cluster_spec) == []


def test_checks_of_headers_take_a_second_and_no_torch(folder: Path) -> None:
    code = f"""
import sys
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.launch.start_checks import check_start
from headrace_base.errors import HeadraceError
ports = {{"routers": {{"port": 0, "grpc_port": 0}}, "admin": {{"port": 0}}}}
for model in ({{}}, {{"source": {str(folder)!r}, "max_model_len": 65}}, {{"replicas": 41}}):
    try:
        check_start(parse_spec(ports | {{"models": [model]}}), print, with_router=True)
        print("passed")
    except HeadraceError as error:
        print(error)
print(sorted({{"torch", "transformers", "ray"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "passed" and "64 positions" in lines[1] and lines[-1] == "[]"
