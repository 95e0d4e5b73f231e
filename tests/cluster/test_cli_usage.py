"""Wrong usage of the command line: one sentence with the most similar flag or command."""

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headrace_cluster.cli import main
from headrace_cluster.cli.app import app
from headrace_cluster.cli.foreign_flags import FLAGS, check_flags
from headrace_cluster.cli.project import Step, run_tests
from headrace_cluster.cli.usage import FOREIGN_COMMANDS, UsageError, usage_sentence
from headrace_cluster.errors import SpecError
from headrace_cluster.spec.cluster_spec import ClusterSpec


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "m", "--tensor-parallel-size", "2"), "no such option --tensor-parallel-size; here it is --tp"),
        (("serve", "--tensor_parallel_size=2"), "no such option --tensor_parallel_size; here it is --tp"),
        (("serve", "-tp", "2"), "no such option -tp; here it is --tp"),
        (("serve", "--dp", "2"), "here it is --replicas"),
        (("serve", "--gpu-memory-utilization", "0.9"), "--kv-cache-memory 20GiB"),
        (("serve", "--model-path", "m"), "headrace serve MODEL"),
        (("controller", "--ctx-size", "4096"), "here it is --max-model-len"),
        (("config", "show", "--context-length", "4096"), "here it is --max-model-len"),
        (("serve", "-ngl", "99"), "--device cuda"),
        (("serve", "m", "--tokenizer", "t"), "it comes with the model"),
        (("serve", "m", "--quantization=awq"), "GGUF"),
        (("serve", "m", "--enforce-eager"), "here it is --cuda-graphs off"),
        (("router", "--routing-logic", "session"), "here it is --policy"),
        (("serve", "m", "--router-mode=kv"), "here it is --policy"),
        (("serve", "m", "--load_balance_method", "minimum_tokens"), "here it is --policy"),
        (("router", "--cache-threshold", "0.5"), "placement has no weights and follows the KV caches by itself"),
        (("serve", "m", "--router-kv-overlap-score-weight=1"), "placement has no weights"),
        (("serve", "m", "--kv-events-config", "{}"), "placement has no weights"),
        (("serve", "m", "--session-key", "x-user-id"), "here it is --policy session, with the id in the header"),
        (
            ("serve", "m", "--kv-transfer-config", "{}"),
            "always send KV blocks to each other; leave it out (pools: --pre",
        ),
    ],
)
def test_flags_of_other_servers_suggest_ours(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError) as raised:
        check_flags(arguments)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("serve --replica 2", "no such option --replica; did you mean --replicas? (headrace serve --help lists all)"),
        ("serve -x", "no such option -x (headrace serve --help lists all)"),
        ("serve --replicas", "option '--replicas' requires an argument"),
        ("serve --replicas many", "--replicas: it must be a whole number"),
        ("serve --verbose=3", "option '--verbose' does not take a value"),
        ("serve a b", "unexpected argument b (headrace serve --help explains it)"),
        ("role m-0", "missing argument prefill|decode|both (headrace role --help explains it)"),
        ("drain m-0 --seconds -1", "--seconds: it must be at least 0"),
        ("router", "name the controller: --controller HOST:PORT"),
        ("statu", "no such command statu; did you mean status? (headrace --help lists all)"),
        ("config frob", "no such command frob (headrace config --help lists all)"),
        ("run m", "no such command run; here it is serve, then chat (headrace --help lists all)"),
        ("ps", "no such command ps; here it is status (headrace --help lists all)"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_COMMAND", "headrace")
    with pytest.raises(UsageError) as raised:
        app(args=arguments.split(), prog_name="headrace", standalone_mode=False)
    assert usage_sentence(raised.value) == sentence


def test_foreign_commands_are_not_commands_here() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert not FOREIGN_COMMANDS.keys() & commands.keys()


@pytest.mark.parametrize("name", ["cache_aware", "Cache-Aware", "kv", "power_of_two", "random", "prefix-aware"])
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
    assert _main("serve --replica 2", monkeypatch) == 2
    assert capsys.readouterr().err.startswith("headrace: no such option --replica; did you mean --replicas?")
    assert _main("", monkeypatch) == 2
    assert capsys.readouterr().err.startswith("Usage: headrace")
    assert _main("serve --help", monkeypatch) == 0
    assert capsys.readouterr().out.startswith("Usage: headrace serve")
    assert _main("version", monkeypatch) == 0
    version = capsys.readouterr().out
    assert _main("--version", monkeypatch) == 0
    assert capsys.readouterr().out == version


def test_help_of_the_test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[list[str]] = []

    def run_tests(rest: list[str]) -> int:
        ran.append(rest)
        return 3

    monkeypatch.setattr("headrace_cluster.cli.project.run_tests", run_tests)
    for arguments in ("test --help", "test -h", "test --faults -h"):
        assert _main(arguments, monkeypatch) == 0
        shown = capsys.readouterr().out
        assert "ruff, mypy" in shown and "--faults" in shown and "-- --help" in shown and len(shown.splitlines()) < 20
    assert ran == []
    assert _main("test -- --help", monkeypatch) == 3
    assert _main("test --newest --faults serve -rfh -k hello", monkeypatch) == 3
    assert ran == [["--help"], ["--faults", "serve", "-rfh", "-k", "hello"]]


def test_arguments_of_the_test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Areas of faults are no folders; paths may be relative to where the user stands."""
    ran: list[list[str]] = []

    def run(steps: list[Step]) -> list[tuple[Step, int, float]]:
        ran.extend(step.command[3:] for step in steps)
        return [(step, 0, 0.0) for step in steps]

    monkeypatch.setattr("headrace_cluster.cli.project._run", run)
    (tmp_path / "test_here.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run_tests(["--faults", "router", "-x"]) == run_tests(["--faults=router"]) == run_tests(["--faults"]) == 0
    assert run_tests(["test_here.py::test_it", "tests/router"]) == 0
    named = [f"{tmp_path}/test_here.py::test_it", "tests/router"]
    assert ran == [["--faults=router", "-x"], ["--faults=router"], ["--faults"], named]


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


@pytest.mark.parametrize(("flags", "port"), [((), 8004), (("--control-port", "0"), 0)])
def test_routers_find_the_next_controller_at_the_same_port(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], port: int
) -> None:
    specs: list[ClusterSpec] = []
    monkeypatch.setattr("headrace_cluster.launch.controller.run_controller", lambda spec, _: specs.append(spec))
    result = CliRunner().invoke(app, ["controller", "tiny", *flags])
    assert (result.exit_code, [spec.control.port for spec in specs]) == (0, [port])
