"""Counts the structure of a protobuf message in its bytes, before it is parsed.

Source: https://protobuf.dev/programming-guides/encoding
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from headrace_router.core.errors import InvalidRequestError

MESSAGE = 8  # what a message costs in values, like an object in JSON
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(0x80, 0x100))  # bytes of a varint but for its last
_STRINGS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_FIXED_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}


class WireError(InvalidRequestError, code="invalid_protobuf"):
    """The message is not acceptable protobuf."""


def check_values(data: bytes, descriptor: Any, limit: int) -> None:
    """Raises WireError if the message has more values than that, or is malformed. A message within counts as 8.

    descriptor: of the message's type.
    """
    count = 0
    pending = [(0, len(data), descriptor)]
    while pending:
        position, end, kind = pending.pop()
        fields = kind.fields_by_number
        while position < end:
            tag, position = _varint(data, position)
            wire = tag & 7
            count += 1
            if wire == _VARINT:
                _, position = _varint(data, position)
            elif wire == _FIXED64:
                position += 8
            elif wire == _FIXED32:
                position += 4
            elif wire == _BYTES:
                length, start = _varint(data, position)
                position = start + length
                if position > end:
                    raise _malformed()
                field = fields.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    count += MESSAGE - 1
                    pending.append((start, position, field.message_type))
                elif field is not None and field.type not in _STRINGS:
                    count += _packed(data, start, position, field)
            else:
                raise _malformed()  # groups, which proto3 does not have
            if count > limit:
                raise WireError(f"The message has more than {limit} values; send shorter lists.")
        if position != end:
            raise _malformed()


def _packed(data: bytes, start: int, end: int, field: FieldDescriptor) -> int:
    """Numbers in a packed list."""
    size = _FIXED_TYPES.get(field.type)
    return (end - start) // size if size else len(data[start:end].translate(None, _CONTINUED))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = shift = 0
    while shift < 70 and position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _malformed()


def _malformed() -> WireError:
    return WireError("The message is not valid protobuf.")
