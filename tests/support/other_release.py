"""Messages as processes of the release before, or of the next one, send them."""

from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_UNKNOWN = b"\xfa\x3f\x03new"  # field 1023, which no message has: 3 bytes


def later(message: M) -> M:
    """The same with a field that this release does not know, here and in every nested message. Changes `message`."""
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for nested in value if field.is_repeated else (value,):
                later(nested)
    message.MergeFromString(_UNKNOWN)
    assert _UNKNOWN in message.SerializeToString()
    return message


def earlier(message: M, *names: str) -> M:
    """The same without fields that are new in this release. Changes `message`."""
    for name in names:
        message.ClearField(name)
    return message
