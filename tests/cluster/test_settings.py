"""Flag > environment > file > default, and what is not a setting."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_base.private_file import PrivateFileError
from headrace_cluster.cli import starting
from headrace_cluster.errors import SpecError
from headrace_cluster.spec.flag import Setting
from headrace_cluster.spec.settings import SETTINGS, build_spec, from_environment, misspelt


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_precedence(tmp_path: Path) -> None:
    path = _file(tmp_path, "routers: {port: 1001, grpc_port: 1002, host: localhost}\nmodels: [{replicas: 2, tp: 2}]\n")
    environ = {"HEADRACE_PORT": "2001", "HEADRACE_REPLICAS": "3", "HEADRACE_ADMIN_PORT": "2003"}
    spec = build_spec({"port": 3001, "dtype": None}, path, environ)
    assert spec.routers.port == 3001  # flag
    assert (spec.models[0].replicas, spec.admin.port) == (3, 2003)  # environment
    assert (spec.routers.grpc_port, spec.routers.host, spec.models[0].tp) == (1002, "localhost", 2)  # file
    assert spec.models[0].block_size == 16  # default


_TEXTS = {  # settings with a notation of their own
    "port_range": "20000-20100",
    "kv_cache_memory": "1GiB",
    "kv_offload_memory": "1GiB",
    "kv_offload_dir": "/var/cache/headrace",
    "kv_offload_dir_size": "10GiB",
    "host": "localhost",
    "profile": "/somewhere",
    "defaults": '{"max_tokens": 7}',
    "node_labels": '{"gpu": "h100"}',
    "cluster": "other",
    "model": "a/b",
    "served_model_name": "name",
    "session_header": "x-conversation",
    "allowed_origins": "https://a.example.com,http://localhost:3000",
    "tool_parser": "hermes",
    "reasoning_parser": "think",
}


def _another_value(setting: Setting, place: int) -> str:
    """A value, as text, that is not the setting's default."""
    of_model = setting.name.removeprefix("prefill_").removeprefix("decode_")
    if of_model in _TEXTS:
        return _TEXTS[of_model]
    if "|" in setting.values:
        return setting.values.split("|")[-1]  # no setting has its last choice as default
    if setting.kind is bool:
        return "true"
    return str(4321 + place) if setting.name.endswith("port") else "7"


def test_every_option_reaches_the_spec_from_flag_and_environment() -> None:
    for place, option in enumerate(SETTINGS):
        value = _another_value(option, place)
        others = {"tp": "2"} if option.name == "ep" else {}
        if option.name.startswith(("prefill", "decode")):
            others = {"prefill": "2", "decode": "2"}
        if option.name.startswith("tls"):
            others = {"tls_cert": "c", "tls_key": "k"}
        if option.name.startswith("kv_offload_dir"):
            others = {"kv_offload_memory": "1GiB", "kv_offload_dir": "d"}
        if option.name == "admin_host":
            others = {"admin_key_file": "k"}
        by_flag = build_spec(others | {option.name: value}, environ={})
        assert by_flag != build_spec(others, environ={}), option.name
        rest = {name: given for name, given in others.items() if name != option.name}
        assert by_flag == build_spec(rest, environ={option.variable: value}), option.name


def test_variables_that_are_empty_or_of_kubernetes_are_no_settings() -> None:
    environ = {"HEADRACE_PORT": "tcp://10.0.0.7:8000", "HEADRACE_GRPC_PORT": "  ", "HEADRACE_HOME": "/x"}
    assert from_environment(environ) == {}


def test_variables_that_are_nearly_settings_are_named() -> None:
    environ = {"HEADRACE_MAX_NUM_SEQ": "4", "HEADRACE_REPLICA": "3", "HEADRACE_API_KEY": "k", "HEADRACE_HOME": "/x"}
    assert misspelt(environ) == [
        "HEADRACE_MAX_NUM_SEQ is not a setting, and not used: did you mean HEADRACE_MAX_NUM_SEQS?",
        "HEADRACE_REPLICA is not a setting, and not used: did you mean HEADRACE_REPLICAS?",
    ]
    ports = ("", "_8000_TCP", "_8000_TCP_ADDR", "_8000_TCP_PORT", "_8000_TCP_PROTO")
    services = [f"HEADRACE{part}" for part in ("", "_ADMIN", "_CONTROLLER", "_HEAD", "_ROUTER", "_ROUTER_METRICS")]
    names = [f"{name}_PORT{end}" for name in services for end in ports]
    names += [f"{name}_SERVICE_{end}" for name in services for end in ("HOST", "PORT", "PORT_HTTP", "PORT_GRPC")]
    assert misspelt(dict.fromkeys(names, "1")) == []


def test_model_flags_need_one_model(tmp_path: Path) -> None:
    path = _file(tmp_path, "models: [{source: a/b}, {source: c/d}]")
    assert len(build_spec({}, path, {}).models) == 2
    with pytest.raises(SpecError, match=r"--tp .* lists 2"):
        build_spec({"tp": 2}, path, {})


def test_keys_from_the_environment() -> None:
    spec = build_spec({}, environ={"HEADRACE_API_KEYS": "first-key-1, second-key-2"})
    assert [key.key.get_secret_value() for key in spec.auth.keys] == ["first-key-1", "second-key-2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 8000", "unknown key 'port'"),
        ("- a", "keys and values"),
        ("models:\n  a: b: c\n", "not YAML: mapping values are not allowed here .* line 2, column 7"),
        ("routers: 5", "routers"),
        ("routers: {port: 1, port: 2}", "is given twice"),
        ("x: !!python/object/apply:os.getpid []", "not YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build_spec({"port": 9} if "routers: 5" in text else {}, _file(tmp_path, text), {})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml cannot be read"):
        build_spec({}, tmp_path / "nowhere.yaml", {})


@pytest.mark.parametrize("auth", ["{keys: [a-key-of-a-tenant]}", "{metrics_key: a-key-for-metrics}"])
def test_a_file_with_keys_must_be_private(tmp_path: Path, auth: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"auth: {auth}")
    file.chmod(0o644)
    with pytest.raises(PrivateFileError, match=f"chmod 600 {file}"):
        build_spec({}, file, {})
    file.chmod(0o600)
    assert build_spec({}, file, {}).auth.keys or build_spec({}, file, {}).auth.metrics_key


def test_the_file_may_be_set_by_the_environment(tmp_path: Path) -> None:
    path = _file(tmp_path, "cluster: from-file")
    assert build_spec({}, environ={"HEADRACE_CONFIG": str(path)}).cluster == "from-file"


@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        ({"kv_cache_memory": "5XB"}, {}, "--kv-cache-memory: write an amount of memory like 2GiB, 512MiB or "),
        ({"replicas": 0}, {"HEADRACE_REPLICAS": "3"}, "--replicas: Input should be greater than or equal to 1, not 0"),
        ({}, {"HEADRACE_REPLICAS": "0"}, "HEADRACE_REPLICAS: Input should be greater than or equal to 1"),
        ({"defaults": '{"top_p": 2}'}, {}, "--defaults: top_p: Input should be less than or equal to 1"),
    ],
)
def test_an_error_has_the_flag_or_variable_that_was_used(flags: Any, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError) as raised:
        build_spec(flags, None, environ)
    assert str(raised.value).startswith(sentence)
    assert str(raised.value).count("5XB") <= 1


def test_each_setting_has_its_flag_in_every_command_that_uses_it() -> None:
    def flags(command: Callable[..., None]) -> set[str]:
        return set(inspect.signature(command).parameters)

    every = {setting.name for setting in SETTINGS}
    routers = {setting.name for setting in SETTINGS if setting.path[0] in ("routers", "auth", "tls", "limits")}
    assert every - flags(starting.serve) == {"ray_address", "ray_no_auth"}, "it starts a Ray of its own"
    assert not every - flags(starting.config_show)
    assert routers - flags(starting.router) == {"routers"}, "the number of routers is one"


def test_help_shows_each_default_that_is_a_value_zero_included() -> None:
    helps = {setting.flag: setting.help for setting in SETTINGS}
    assert "[default:" not in helps["--verbose"] + helps["--profile"]
    assert helps["--control-port"].endswith("[default: 8004; with `serve` any]")
    assert helps["--cpu-share"].endswith("[default: 0.05]")
