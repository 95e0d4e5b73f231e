"""`headrace chat`: the conversation, its commands, and one turn after the other."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from headrace_base.errors import HeadraceError
from headrace_cluster.cli import options as o
from headrace_cluster.cli.api_client import ApiClient, ChatDelta, api_client
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.program import program_name
from headrace_cluster.spec.settings import from_environment

DIM, RED = "\x1b[2m", "\x1b[31m"
# Control characters of an answer must not reach a terminal, which would interpret them.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

app = typer.Typer(rich_markup_mode=None)


class ChatError(HeadraceError):
    """A command, a setting or an input of a chat cannot be used."""


@app.command()
@o.takes_server()
def chat(
    choice: ServerChoice,
    once: Annotated[str | None, typer.Option("--once", metavar="TEXT", help="Print one answer and exit.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="[default: the server's first]")] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, max=2.0)] = None,
    tools: Annotated[
        Path | None, typer.Option("--tools", metavar="FILE", help="Tools that the model may call, as JSON.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show speed and tokens of each answer, on stderr.")] = False,
    host: Annotated[
        str | None, typer.Option("--host", help="Of a server elsewhere, with --port; https://HOST with TLS.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="HEADRACE_API_KEY", help="Key of the API, if it needs one.")
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", envvar="HEADRACE_CA", help="Authorities that --host's certificate must be of (PEM); uses TLS."
        ),
    ] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option(
            "--client-cert",
            envvar="HEADRACE_CLIENT_CERT",
            help="Certificate and key, if the server requires one (PEM).",
        ),
    ] = None,
) -> None:
    """Talk to a running server. A standard input that is not a terminal is one message: headrace chat < FILE."""
    host = host or from_environment(os.environ).get("host")
    client = api_client(choice, host, api_key, ca=ca, client_cert=client_cert)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "tools": read_tools(tools) if tools else None,
        "stream_options": {"include_usage": True} if stats else None,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    start_chat(Conversation(client, model or "", system, fields), once)


@dataclass(slots=True)
class Conversation:
    """Messages and answers; the last message has no answer if that failed, or was stopped before its text.

    fields: others of the requests, such as tools. With stream_options, for token counts, the speed is shown.
    """

    client: ApiClient
    model: str
    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str) -> str | None:
        """Prints the answer to a message, or to the result of a call once all have one; returns its finish reason.

        Raises a HeadraceError, and KeyboardInterrupt: the text that has arrived then counts as the answer.
        """
        if calls := self.open_calls():
            self.messages.append({"role": "tool", "tool_call_id": calls[0], "content": text})
            if len(calls) > 1:
                return None
        else:
            if self.messages and self.messages[-1]["role"] == "user":
                self.messages.pop()
            self.messages.append({"role": "user", "content": text})
        return self._answer()

    def ask_again(self) -> None:
        """Prints another answer to the last message, in place of its answer. Raises as `ask`; ChatError: no message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise ChatError("there is no message to ask again")
        self._answer()

    def open_calls(self) -> list[str]:
        """Ids of calls that have no result yet; the next messages are their results."""
        calls = [str(call["id"]) for message in self.messages for call in message.get("tool_calls", ())]
        results = {message.get("tool_call_id") for message in self.messages}
        return [call for call in calls if call not in results]

    def _answer(self) -> str | None:
        answer = _Answer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            raise
        # Arguments that the limit of tokens has cut off are no JSON.
        calls = list(answer.calls.values()) if answer.finish_reason != "length" else []
        self.messages.append({"role": "assistant", "content": answer.text} | ({"tool_calls": calls} if calls else {}))
        for call in answer.calls.values():
            kind, arguments = _kind(call)
            show(f"call: {call[kind]['name']}({call[kind][arguments]})", DIM)
        if answer.usage:
            show(answer.summary(answer.usage), DIM)
        return answer.finish_reason

    def _stream(self, answer: "_Answer") -> None:
        """Prints and collects an answer. The connection is always closed."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.messages, **self.fields}
        unfinished: TextIO | None = None  # the stream whose line has not ended
        try:
            with contextlib.closing(self.client.chat(body)) as deltas:
                for delta in deltas:
                    answer.add(delta)
                    if delta.reasoning:
                        show(delta.reasoning, DIM, end="")
                        unfinished = sys.stderr
                    if delta.text:
                        show("", end="\n\n" if unfinished is sys.stderr else "")
                        show(delta.text, end="", stream=sys.stdout)
                        unfinished = sys.stdout
        finally:
            if unfinished:
                show("", stream=unfinished)


class _Answer:
    """One answer as far as it has arrived; its time starts now."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self._start = self._first = self._last = time.monotonic()

    def add(self, delta: ChatDelta) -> None:
        if delta.text or delta.reasoning:
            self._last = time.monotonic()
            self._first = self._last if self._first == self._start else self._first
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage
        for part in delta.calls:
            kind, arguments = _kind(part)
            given = part.get(kind) or {}
            new = {"id": part.get("id"), "type": kind, kind: {"name": given.get("name"), arguments: ""}}
            call = self.calls.setdefault(part.get("index", 0), new)
            call[kind][arguments] += given.get(arguments) or ""

    def summary(self, usage: dict[str, Any]) -> str:
        """Tokens by the server's count, tokens per second after the first one, and the time to it."""
        tokens, prompt = (int(usage.get(name, 0)) for name in ("completion_tokens", "prompt_tokens"))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        spent = self._last - self._first
        rate = f"{(tokens - 1) / spent:.1f} tok/s, " if tokens > 1 and spent > 0 else ""
        return f"{tokens} tokens, {rate}TTFT {self._first - self._start:.2f} s; prompt {prompt} tokens, {cached} cached"


def _kind(call: dict[str, Any]) -> tuple[str, str]:
    """Two keys of a call, or of a part of a call: the field with its name, and the field in it with its arguments."""
    return ("custom", "input") if "custom" in call else ("function", "arguments")


def show(text: str, style: str = "", *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Prints text, to stderr by default; on a terminal without control characters and, unless NO_COLOR, in a style."""
    stream = stream or sys.stderr
    if stream.isatty():
        colored = style and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        text = f"{style}{without_controls(text)}\x1b[0m" if colored else without_controls(text)
    stream.write(text + end)
    stream.flush()


def without_controls(text: str) -> str:
    """Text whose control characters a terminal would interpret."""
    return text.translate(_CONTROLS)


# Fields of POST /v1/chat/completions, which defines their types and ranges.
SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stats",
)  # fmt: skip
COMPLETIONS = ("/help", "/clear", "/system", *(f"/set {name}" for name in SETTINGS), "/model", "/retry", "/bye")
_HELP = """\
  /clear             remove the messages; system message and settings stay
  /system [TEXT]     show or set the system message; /system none removes it
  /set [NAME VALUE]  show or change settings: temperature 0.5, seed default, stats on, ...
  /model [NAME]      list the server's models, or switch to another
  /retry             ask the last message again
  /bye               leave, as Ctrl-D; Ctrl-C ends an answer, then the line, then the chat
  Enter sends, Esc Enter begins a new line; Tab completes, Up and Ctrl-R recall what was entered before."""


def run_command(line: str, conversation: Conversation) -> str:
    """Runs a command and returns what it reports. Raises a HeadraceError with a sentence for the user."""
    name, _, argument = map(str.strip, line.partition(" "))
    match name:
        case "/help":
            return _HELP
        case "/clear":
            conversation.messages.clear()
            return "The conversation is empty."
        case "/system":
            if argument:
                conversation.system = argument if argument != "none" else None
            return f"system message: {conversation.system}" if conversation.system else "There is no system message."
        case "/set":
            return _set(argument, conversation)
        case "/model":
            models = conversation.client.models()
            if not argument:
                return "\n".join(f"{'*' if model == conversation.model else ' '} {model}" for model in models)
            conversation.model = choose_model(argument, models)
            return f"The model is {conversation.model}; the conversation continues."
        case "/retry":
            conversation.ask_again()
            return ""
    raise ChatError(f"there is no command {name[:40]}; /help lists them. A space before a slash sends a message")


def choose_model(given: str | None, models: list[str]) -> str:
    """The given model if the server has it; None: its first one. Raises ChatError."""
    if not models:
        raise ChatError(f"the server has no model yet; wait until it is ready ({program_name()} status)")
    if given is not None and given not in models:
        raise ChatError(f"the server has no model {given[:80]}; it has: {', '.join(models)}")
    return given or models[0]


def _set(argument: str, conversation: Conversation) -> str:
    name, _, text = argument.partition(" ")
    fields = conversation.fields
    if name and name not in SETTINGS:
        raise ChatError(f"there is no setting {name[:40]}; there are: {', '.join(SETTINGS)}")
    if name == "stats" and text:
        fields["stream_options"] = {"include_usage": text.strip() == "on"}
    elif text.strip() == "default":
        fields.pop(name, None)
    elif text:
        try:
            fields[name] = json.loads(text)
        except ValueError:
            raise ChatError(f"{name} is a number, not {text[:40]}") from None
    values = fields | {"stats": "on" if fields.get("stream_options", {}).get("include_usage") else "off"}
    return "\n".join(f"{key} is {values.get(key, 'default')}" for key in SETTINGS if not name or key == name)


def start_chat(conversation: Conversation, once: str | None) -> None:
    """`once` or a standard input that is not a terminal is one message; else a conversation. Raises HeadraceError."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # not every locale has an answer's characters
    if once is None and sys.stdin is not None and sys.stdin.isatty():
        _talk(conversation)
        return
    text = once if once is not None else _read_input()
    if not text.strip():
        if once is None:
            return  # as in a script without a terminal
        raise ChatError("the message is empty: there is nothing to answer")
    conversation.model = conversation.model or choose_model(None, conversation.client.models())
    conversation.ask(text)


def run_conversation(conversation: Conversation, read: Callable[[], str]) -> None:
    """Answers entries until the user leaves; a failure does not end the conversation. read: the next entry."""
    while True:
        if conversation.open_calls():
            show("(the next message is the result of the first call that has none)", DIM)
        try:
            entry = read().rstrip()
        except (EOFError, KeyboardInterrupt):
            return
        if entry in ("/bye", "/exit", "/quit"):
            return
        try:
            if entry.startswith("/"):
                show(run_command(entry, conversation))
            elif entry and conversation.ask(entry) == "length":
                show("(the limit of tokens is reached; /set max_tokens N changes it)", DIM)
        except HeadraceError as error:
            show(f"headrace: {error}", RED)
        except KeyboardInterrupt:
            show("(stopped; /retry asks again)", DIM)


def _talk(conversation: Conversation) -> None:
    from headrace_cluster.cli.chat_editor import make_editor

    models = conversation.client.models()
    conversation.model = choose_model(conversation.model or None, models)
    show(f"{conversation.model}: /help lists commands, Ctrl-C ends an answer, Ctrl-D leaves", DIM)
    run_conversation(conversation, make_editor([*COMPLETIONS, *(f"/model {name}" for name in models)]).prompt)


def read_tools(path: Path) -> list[dict[str, Any]]:
    """The tools of a JSON file. Raises ChatError."""
    try:
        tools = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(tools, list):
        raise ChatError(f"{path} is not a list of tools, as the field 'tools' of /v1/chat/completions has them")
    return tools


def _read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode().strip("\r\n") if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise ChatError("standard input is not UTF-8 text") from error
