"""Flags of other servers, exit statuses and help."""

import sys
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from headrace_cluster.cli import main
from headrace_cluster.cli.app import app
from headrace_cluster.cli.foreign_flags import FLAGS, check_flags
from headrace_cluster.errors import SpecError
from headrace_cluster.spec.cluster_spec import ClusterSpec


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "m", "--tensor-parallel-size", "2"), "no such option --tensor-parallel-size; here it is --tp"),
        (("serve", "--tensor_parallel_size=2"), "no such option --tensor_parallel_size; here it is --tp"),
        (("serve", "-tp", "2"), "no such option -tp; here it is --tp"),
        (("serve", "--gpu-memory-utilization", "0.9"), "--kv-cache-memory 20GiB"),
        (("serve", "--model-path", "m"), "headrace serve MODEL"),
        (("controller", "--ctx-size", "4096"), "here it is --max-model-len"),
        (("serve", "m", "--load_balance_method", "minimum_tokens"), "here it is --policy"),
        (("router", "--cache-threshold", "0.5"), "placement has no weights and follows the KV caches by itself"),
    ],
)
def test_flags_of_other_servers_suggest_ours(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError) as raised:
        check_flags(arguments)
    assert words in str(raised.value)


@pytest.mark.parametrize("name", ["Cache-Aware", "random"])
def test_policies_of_other_routers_suggest_ours(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(f"config show --policy {name}", monkeypatch) == 2
    assert "; predicted, the default, knows the KV caches and the load: leave" in capsys.readouterr().err
    assert _main("config show --policy Round_Robin", monkeypatch) == 0
    assert "policy: round-robin" in capsys.readouterr().out


def _main(arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_exit_statuses_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in (("", 2), ("serve --help", 0)):
        assert _main(arguments, monkeypatch) == status
        assert "Usage: headrace" in "".join(capsys.readouterr())
    for arguments in ("version", "--version"):
        assert _main(arguments, monkeypatch) == 0
        assert capsys.readouterr().out == f"{version('headrace')}\n"


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ("-- --help", ["--help"]),
        ("--newest --faults router -rfh -k hello", ["--faults=router", "-rfh", "-k", "hello"]),
        ("--faults -x", ["--faults", "-x"]),
    ],
)
def test_arguments_of_the_test_command_are_those_of_pytest(
    monkeypatch: pytest.MonkeyPatch, arguments: str, ran: list[str]
) -> None:
    """An area of faults is no folder."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr("headrace_cluster.cli.project._passes", commands.append)
    assert _main(f"test {arguments}", monkeypatch) == 1
    assert commands == [("pytest", *ran)]


def test_our_flags_are_not_in_the_table_of_foreign_flags() -> None:
    """A flag of ours in that table would be rejected; a suggested flag must exist."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {flag for p in command.params for flag in p.opts} for name, command in commands.items()}
    assert not FLAGS.keys() & options["serve"], "ours"
    for here in FLAGS.values():
        assert not here.startswith("--") or here.split()[0].rstrip(",") in options["serve"], here
    assert not FLAGS.keys() & options["router"], "ours"
    check_flags(("serve", "Qwen/Qwen3-0.6B", "--tp", "2", "--served-model-name", "m"))
    check_flags(("chat", "--model", "m"))
    check_flags(("test", "-m", "slow"))


@pytest.mark.parametrize(("flags", "port"), [((), 8004), (("--take-over",), 8004), (("--control-port", "0"), 0)])
def test_routers_find_the_next_controller_at_the_same_port(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], port: int
) -> None:
    started: list[tuple[int | None, bool]] = []

    def run(spec: ClusterSpec, file: object, *, take_over: bool) -> None:
        started.append((spec.control.port, take_over))

    monkeypatch.setattr("headrace_cluster.launch.controller_run.run_controller", run)
    result = CliRunner().invoke(app, ["controller", "tiny", *flags])
    assert (result.exit_code, started) == (0, [(port, "--take-over" in flags)])
