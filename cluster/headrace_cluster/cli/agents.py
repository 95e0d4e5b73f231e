"""`headrace launch`: a coding agent that uses the models of a server, set up by its arguments and environment alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headrace_base.errors import HeadraceError
from headrace_cluster.cli import options as o
from headrace_cluster.cli.api_client import api_client
from headrace_cluster.cli.servers import ServerChoice, choose
from headrace_cluster.errors import NotRunningError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local import state
from headrace_cluster.local.state import ServeState
from headrace_cluster.spec.settings import from_environment

LEAST_CONTEXT = 32 << 10  # tokens: the first prompts of agents have 20,000 and more
ANSWER_TOKENS = 8 << 10  # of the context, at most, that opencode leaves to an answer
ENDING = (signal.SIGTERM, signal.SIGHUP)
START_SECONDS = 900.0  # that a server of this machine may take to start
KEY_VARIABLE = "HEADRACE_API_KEY"
NO_KEY = "none"  # where the server needs no key: agents insist on one

app = typer.Typer(rich_markup_mode=None)


class LaunchError(HeadraceError):
    """The agent is not installed, or the server could not be started for it."""


class AgentName(StrEnum):
    CODEX = "codex"
    CLAUDE = "claude"
    OPENCODE = "opencode"


@dataclass(frozen=True, slots=True)
class Target:
    """What the agent uses. url: of the server, without /v1. context: tokens; None if it is not known."""

    url: str
    model: str
    key: str
    context: int | None
    ca: Path | None = None  # authorities of the server's certificate


INSTALL = {
    AgentName.CODEX: "npm install -g @openai/codex",
    AgentName.CLAUDE: "npm install -g @anthropic-ai/claude-code",
    AgentName.OPENCODE: "npm install -g opencode-ai",
}


def command_of(agent: AgentName, target: Target, arguments: Sequence[str]) -> list[str]:
    """The command line; codex takes its settings there, so that its config.toml stays as it is."""
    if agent is not AgentName.CODEX:
        return [agent, *arguments]
    provider = {"name": "Headrace", "base_url": f"{target.url}/v1", "wire_api": "responses", "env_key": KEY_VARIABLE}
    table = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    settings = {
        "model": json.dumps(target.model),
        "model_provider": '"headrace"',
        "model_providers.headrace": f"{{{table}}}",
        **({"model_context_window": str(target.context)} if target.context else {}),
    }
    return [agent, *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")), *arguments]


def variables_of(agent: AgentName, target: Target) -> dict[str, str]:
    """Variables of the agent's environment."""
    found = {"SSL_CERT_FILE": str(target.ca), "NODE_EXTRA_CA_CERTS": str(target.ca)} if target.ca else {}
    if agent is AgentName.CODEX:
        return {**found, KEY_VARIABLE: target.key}
    if agent is AgentName.OPENCODE:
        limit = {}
        if target.context:
            limit = {"limit": {"context": target.context, "output": min(ANSWER_TOKENS, target.context // 4)}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Headrace",
            "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
            "models": {target.model: {"name": target.model, **limit}},
        }
        chosen = f"headrace/{target.model}"
        config = {"provider": {"headrace": provider}, "model": chosen, "small_model": chosen}
        return {**found, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    models: tuple[str, ...] = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    models += tuple(f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU"))
    return {
        **found,
        **dict.fromkeys(models, target.model),
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",  # another one would be preferred
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context)} if target.context else {}),
    }


def trial_request(agent: AgentName, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request such as the agent sends, for one token."""
    asked = [{"role": "user", "content": "Hi"}]
    if agent is AgentName.CODEX:
        return "/v1/responses", {"model": model, "input": asked, "max_output_tokens": 1, "store": False}
    path = "/v1/messages" if agent is AgentName.CLAUDE else "/v1/chat/completions"
    return path, {"model": model, "messages": asked, "max_tokens": 1}


class _Command(TyperCommand):
    """What follows `--` is for the agent, whatever it looks like."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta["arguments"] = args[place + 1 :]
        return super().parse_args(ctx, args[:place])


@app.command(cls=_Command, epilog="What follows -- is for the agent: headrace launch codex -- exec 'Fix the tests'")
@o.takes_server()
def launch(
    choice: ServerChoice,
    context: typer.Context,
    agent: Annotated[AgentName, typer.Argument(help="The program, which must be installed.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="[default: the server's first]; without a server, what serve takes."),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Of a server elsewhere, with --port.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="HEADRACE_API_KEY", help="Key of the API, if it needs one.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", envvar="HEADRACE_CA", help="Authorities of the server's certificate (PEM).")
    ] = None,
) -> None:
    """Run a coding agent with a model of a running server, or of one that is started for it.

    Its settings are in its environment and arguments: no file is written or changed.
    """
    if shutil.which(agent) is None:
        raise LaunchError(f"{agent} is not installed, or not in PATH; one way: {INSTALL[agent]}")
    host = host or from_environment(os.environ).get("host")
    arguments = context.meta["arguments"]
    named = choice.given and not choice.given.startswith("HEADRACE_")  # a variable is also for the server that starts
    if host is not None or named or choose(choice, state.running()) is not None:
        code = _run(agent, _target(agent, choice, host, model, api_key, ca), arguments)
    else:
        with _started(model) as started:
            code = _run(agent, _target(agent, started, None, None, api_key, ca), arguments)
    raise typer.Exit(code)


def _target(
    agent: AgentName, choice: ServerChoice, host: str | None, model: str | None, key: str | None, ca: Path | None
) -> Target:
    """The model and its context, after a request for one token. model: None = the first one."""
    if host is None:
        server = _await(choice, key)
        ca = ca or (Path(server.tls_cert) if server is not None and server.tls_cert else None)
    client = api_client(choice, host, key, ca=ca)
    entry = client.describe(model) if model is not None else client.described()[0]
    length = entry.get("max_model_len")
    if length is not None and length < LEAST_CONTEXT:
        show_message(
            f"the context of {entry['id']} has {length} tokens, and first prompts of agents may have 20,000: start the "
            f"server with --max-model-len {2 * LEAST_CONTEXT}; a model that takes less cannot run all agents",
            "warning",
        )
    client.post(*trial_request(agent, str(entry["id"])))
    return Target(client.url, str(entry["id"]), key or NO_KEY, length, ca)


def _run(agent: AgentName, target: Target, arguments: Sequence[str]) -> int:
    """Runs the agent to its end; its exit code."""
    show_message(f"{agent} uses {target.model} of {target.url}")
    environment = {**os.environ, **variables_of(agent, target)}
    ended: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def end(number: int, _: object) -> None:
        ended.append(number)
        if process is not None:
            process.terminate()

    for number in ENDING:  # the agent ends, and then this process
        signal.signal(number, end)
    try:
        process = subprocess.Popen(command_of(agent, target, arguments), env=environment)
    except OSError as error:
        raise LaunchError(f"{agent} cannot be run: {error.strerror}") from error
    if ended:
        process.terminate()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return 128 + ended[0] if ended else code


def _await(choice: ServerChoice, key: str | None) -> ServeState | None:
    """The server of this machine, once it has a model that is ready; None if there is none, or not any more."""
    end, told = time.monotonic() + START_SECONDS, False
    while (server := choose(choice, state.running())) is not None and time.monotonic() < end:
        with suppress(NotRunningError):
            if not server.starting and api_client(choice, None, key).ready():
                break
        if not told:
            show_message("waiting for the server, which is starting")
            told = True
        time.sleep(0.5)
    return server


@contextmanager
def _started(model: str | None) -> Iterator[ServerChoice]:
    """A server for this agent; it is stopped at the end. Raises LaunchError.

    Its messages are shown until the agent has the terminal.
    """
    show_message("no server runs here: one is started, and stopped when the agent ends")
    command = [sys.executable, "-m", "headrace_cluster", "serve", *([model] if model is not None else [])]
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    process = subprocess.Popen(command, text=True, start_new_session=True, stdin=nothing, stdout=nothing, stderr=pipe)
    messages, ready = process.stderr, threading.Event()

    def show() -> None:
        for line in messages or ():
            if not ready.is_set():
                print(line, end="", file=sys.stderr, flush=True)

    threading.Thread(target=show, daemon=True).start()
    try:
        for number in ENDING:  # so that the server is stopped
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        choice = None
        while choice is None:
            if process.poll() is not None:
                raise LaunchError("the server has ended; its messages are above")
            time.sleep(0.2)
            own = [server for server in state.running() if server.pid == process.pid and not server.starting]
            choice = ServerChoice(admin_port=own[0].admin_port, given="the server that was started") if own else None
        if _await(choice, None) is None:
            raise LaunchError("the server has ended; its messages are above")
        ready.set()
        yield choice
    finally:
        process.terminate()
        process.wait()
