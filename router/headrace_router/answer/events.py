"""The parts of an answer, in the order in which the model writes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins: its name is complete. custom: the tool takes free text."""

    name: str
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Args:
    """A part of the call's arguments, as JSON; all parts together are an object. Of a custom tool: of its free text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. A call without this was cut off."""


Event = Text | Reasoning | CallStart | Args | CallEnd


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbouring parts of one text joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Args) and isinstance(last, Args):
            found[-1] = Args(last.text + event.text)
        else:
            found.append(event)
    return found
