"""Parses an entry at the prompt: a message for the model, a command, or nothing."""

from dataclasses import dataclass

BLOCK = '"""'


@dataclass(frozen=True, slots=True)
class Message:
    """Text for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command; `name` is without the slash."""

    name: str
    argument: str


def parse_entry(entry: str) -> Message | Command | None:
    """None if there is nothing to send. With a second slash, or a space before the first, it is a message."""
    text = entry.strip("\r\n").rstrip()
    if not text.strip():
        return None
    if text.startswith("//"):
        return Message(text[1:])
    if text.startswith("/"):
        name, argument = _split_command(text)
        return Command(name, _without_block(argument))
    if text.lstrip().startswith("/"):
        return Message(text.lstrip())
    return Message(_without_block(text))


def is_unfinished(entry: str) -> bool:
    """Whether a block of triple quotes is open, so that Enter adds a line instead of sending the entry."""
    text = entry.lstrip()
    if text.startswith("/") and not text.startswith("//"):
        text = _split_command(text)[1]
    return text.startswith(BLOCK) and text.count(BLOCK) == 1


def _split_command(text: str) -> tuple[str, str]:
    words = text[1:].split(maxsplit=1)
    if not words or text[1:2].isspace():
        return "", text[1:].strip()
    return words[0], words[1].rstrip() if len(words) > 1 else ""


def _without_block(text: str) -> str:
    """The content of a text that is one block; its quotes may be on separate lines."""
    is_block = text.startswith(BLOCK) and text.endswith(BLOCK) and len(text) >= 2 * len(BLOCK)
    if not is_block or text.count(BLOCK) != 2:
        return text
    return text[len(BLOCK) : -len(BLOCK)].removeprefix("\n").removesuffix("\n")
