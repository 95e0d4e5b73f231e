"""Generated messages of a peer that has a certificate: valid protobuf whose fields no peer of ours sends."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Given = Mapping[str, SearchStrategy[Any]]

_FLOATS = st.sampled_from([float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 0.5, 1e308])
_UNSIGNED = {32: st.sampled_from([0, 1, 2, 255, 2**31, 2**32 - 1]), 64: st.sampled_from([0, 1, 2**32, 2**64 - 1])}
_SIGNED = {32: st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]), 64: st.sampled_from([-(2**63), -1, 0, 2**63 - 1])}
_TEXTS = st.sampled_from(["", "m", "r", "é\x00\n", "x" * 5000])
_BYTES = st.sampled_from([b"", b"a" * 16, b"\x00" * 32, b"x" * 5000]) | st.binary(max_size=20)


def messages(descriptor: Descriptor, given: Given | None = None, depth: int = 4) -> SearchStrategy[Message]:
    """Messages of a type. given: values of fields by their full name, besides the generated ones."""
    make = GetMessageClass(descriptor)
    fields = [field for field in descriptor.fields if depth or not _nested(field)]
    values = {field.name: _field(field, given or {}, depth) for field in fields}
    return st.fixed_dictionaries({}, optional=values).map(lambda chosen: make(**chosen))


def altered(base: Message, given: Given | None = None) -> SearchStrategy[Message]:
    """The message with one field of it, at any depth, replaced or cleared."""

    def other(field: FieldDescriptor) -> SearchStrategy[Message]:
        found = _field(field, given or {}, depth=2)
        value = getattr(base, field.name)
        if _nested(field) and not _is_map(field) and (field.is_repeated or value.ByteSize()):
            parts = list(value) if field.is_repeated else [value]
            for part in parts[:1]:
                inner = altered(part, given)
                found |= inner.map(lambda one: [one]) if field.is_repeated else inner
        return found.map(lambda value: _with(base, field.name, value))

    fields: Any = base.DESCRIPTOR.fields
    found: SearchStrategy[Message] = st.sampled_from(list(fields)).flatmap(other)
    return found


def damaged(valid: bytes, pieces: Sequence[bytes] = ()) -> SearchStrategy[bytes]:
    """The valid bytes with some parts replaced, removed or repeated, and others. pieces: that may replace parts."""
    other = st.binary(max_size=40) | st.sampled_from(pieces) if pieces else st.binary(max_size=20)
    edits = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 20), other), min_size=1, max_size=6)

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        content = valid
        for start, length, piece in changes:
            place = start % (len(content) + 1)
            content = content[:place] + piece + content[place + length :]
        return content

    return edits.map(apply) | st.binary(max_size=300)


def _with(base: Message, name: str, value: object) -> Message:
    copy = type(base)()
    copy.CopyFrom(base)
    copy.ClearField(name)
    copy.MergeFrom(type(base)(**{name: value}))
    return copy


def _nested(field: FieldDescriptor) -> bool:
    return field.message_type is not None


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _field(field: FieldDescriptor, given: Given, depth: int) -> SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and _is_map(field):
        key, value = (kind.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_scalar(key, given), _scalar(value, given), max_size=3)
    one = messages(kind, given, depth - 1) if kind is not None else _scalar(field, given)
    if not field.is_repeated:
        return one
    return st.lists(one, max_size=3) | st.tuples(one, st.sampled_from([5, 40])).map(lambda of: [of[0]] * of[1])


def _scalar(field: FieldDescriptor, given: Given) -> SearchStrategy[Any]:
    kind = field.cpp_type
    found: SearchStrategy[Any]
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        found = _FLOATS
    elif kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        found = _UNSIGNED[32 if kind == FieldDescriptor.CPPTYPE_UINT32 else 64]
    elif kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        found = _SIGNED[32 if kind == FieldDescriptor.CPPTYPE_INT32 else 64]
    elif kind == FieldDescriptor.CPPTYPE_ENUM:
        found = _SIGNED[32]
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        found = st.booleans()
    else:
        found = _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS
    return found | given[field.full_name] if field.full_name in given else found


def is_ours(record: logging.LogRecord) -> bool:
    """Whether an error in the log is not grpc's own, of a client that cancelled while an answer was sent."""
    return record.levelno >= logging.ERROR and "ExecuteBatchError" not in record.getMessage()
