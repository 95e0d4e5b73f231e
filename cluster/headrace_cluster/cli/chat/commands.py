"""The slash commands of a conversation."""

import json

from headrace_cluster.cli.chat.conversation import ChatError, Conversation
from headrace_cluster.program import program_name

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
