"""The GGUF container: metadata and tensor directory, read through a memory map of each file.

Implements the format's specification (ggml, docs/gguf.md), and the parts that llama.cpp's `gguf-split` makes of one
model. Parses ~100,000 tokenizer strings in about 0.1 s, for a short start-up. Imports neither torch nor transformers,
so that clients of `source` stay fast.
"""

import mmap
import re
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_base.errors import ModelLoadError, ModelSourceError
from headrace_worker.model.gguf_metadata import number

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type -> struct format, per the specification
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
_MAX_ENTRIES = 1 << 16  # tensors, or keys: models have thousands at most
_MAX_ELEMENTS = 1 << 24  # elements of an array: the largest vocabularies have a million
_MAX_ALIGNMENT = 1 << 20
_MAX_NAME = 1 << 10  # bytes of a key, or of a tensor's name
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]  # row-major, as torch has it (the file lists the fastest dimension first)
    type_id: int  # ggml type number
    offset: int  # bytes from the start of the buffer
    buffer: mmap.mmap  # the whole file


def first_part(path: Path) -> Path:
    """The first part of the split model that a file belongs to by its name; else the file itself."""
    name, part, count = _split_name(path)
    return path.with_name(f"{name}-00001-of-{count:05}.gguf") if part else path


def gguf_parts(path: Path) -> list[Path]:
    """The files of the model at `path`: of a split one all parts, in order, by their names.

    Raises ModelSourceError where a part is missing, and for another part than the first.
    """
    name, part, count = _split_name(path)
    if not part:
        return [path]
    parts = [path.with_name(f"{name}-{place:05}-of-{count:05}.gguf") for place in range(1, count + 1)]
    for place, file in enumerate(parts, 1):
        if not file.is_file():
            raise ModelSourceError(
                f"Of the split GGUF model {name!r} part {place} of {count} is missing: download {file.name} into the "
                "folder of the other parts."
            )
    if part != 1:
        raise ModelSourceError(
            f"{path.name} is part {part} of {count} of a split GGUF model: name the first part, {parts[0].name}; the "
            "others are found beside it."
        )
    return parts


def _split_name(path: Path) -> tuple[str, int, int]:
    """Name, part and number of parts of a split model by the name of one file; of another file its name, 0 and 0."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return path.stem, 0, 0
    return match[1], int(match[2]), int(match[3])


class GgufFile:
    """A GGUF model: one file, or all parts of a split one as if they were one."""

    def __init__(self, path: Path) -> None:
        """path: of the file, or of the first part. Raises ModelSourceError as `gguf_parts` does, ModelLoadError when
        one is not a GGUF file, is damaged, or does not belong to the others.
        """
        self.name = path.name
        self.parts = [GgufPart(part) for part in gguf_parts(path)]
        self.metadata = self.parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for place, part in enumerate(self.parts):
            self._check_split(part, place)
            if twice := self.tensors.keys() & part.tensors.keys():
                raise ModelLoadError(
                    f"{part.name} and an earlier part have the same tensor, {min(twice)[:80]!r}: download all parts "
                    "again."
                )
            self.tensors.update(part.tensors)
        expected = number(self.metadata, "split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ModelLoadError(
                f"The {len(self.parts)} parts of {path.name} have {len(self.tensors)} of its {expected} tensors: "
                "download all parts again."
            )

    def _check_split(self, part: "GgufPart", place: int) -> None:
        count, found = number(part.metadata, "split.count", 1), number(part.metadata, "split.no", 0)
        if max(1, count) != len(self.parts):
            raise ModelLoadError(
                f"{part.name} is part {found + 1} of {count} of a split GGUF model by its header: all parts must be in "
                f"one folder, with the names that the split gave them, NAME-00001-of-{count:05}.gguf and so on."
            )
        if found != place:
            raise ModelLoadError(
                f"{part.name} is part {found + 1} of {count} by its header, not part {place + 1}: give the file its "
                "name back, or download it again."
            )


class GgufPart:
    """One file's header. `buffer` maps the whole file; tensors are views of it."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError when it is not a GGUF file, or damaged."""
        self.name = path.name
        try:
            with path.open("rb") as file:
                if path.stat().st_size < 24:
                    raise ModelLoadError(f"{path.name} is too short for a GGUF file; download it again.")
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path.name} cannot be read ({error.strerror}): check the file.") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._parse(path.name)
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise ModelLoadError(f"{path.name} is a damaged GGUF file ({error}): download it again.") from error

    def _parse(self, name: str) -> None:
        magic, version, tensor_count, pair_count = struct.unpack_from("<4sIQQ", self.buffer, 0)
        if magic != _MAGIC:
            raise ModelLoadError(f"{name} is not a GGUF file (it does not begin with 'GGUF').")
        if version not in _VERSIONS:
            raise ModelLoadError(f"{name} has GGUF version {version}; versions 2 and 3 (little-endian) are read.")
        if max(tensor_count, pair_count) > _MAX_ENTRIES:
            raise IndexError(f"its header declares {tensor_count} tensors and {pair_count} keys")
        position = 24
        for _ in range(pair_count):
            key, position = self._name(position)
            (kind,) = struct.unpack_from("<I", self.buffer, position)
            if key in self.metadata:
                raise IndexError(f"the key {key!r} occurs twice")
            self.metadata[key], position = self._value(kind, position + 4)
        directory: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            tensor, position = self._name(position)
            (dims,) = struct.unpack_from("<I", self.buffer, position)
            if dims > _MAX_DIMS:
                raise ModelLoadError(f"{name} is a damaged GGUF file: a tensor has {dims} dimensions.")
            *shape, type_id, offset = struct.unpack_from(f"<{dims}QIQ", self.buffer, position + 4)
            position += 4 + 8 * dims + 12
            if tensor in directory:
                raise IndexError(f"the tensor {tensor!r} occurs twice")
            if not shape or 0 in shape:
                raise IndexError(f"the tensor {tensor!r} has no elements")
            directory[tensor] = tuple(reversed(shape)), type_id, offset
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise IndexError(f"its alignment is {str(alignment)[:80]}")
        self.header_bytes = position
        start = -(-position // alignment) * alignment
        for tensor, (torch_shape, type_id, offset) in directory.items():
            if offset % alignment:
                raise IndexError(f"the tensor {tensor!r} is not at a multiple of {alignment} bytes")
            self.tensors[tensor] = GgufTensor(tensor, torch_shape, type_id, start + offset, self.buffer)

    def _name(self, position: int) -> tuple[str, int]:
        name, end = self._string(position)
        if end - position > 8 + _MAX_NAME:
            raise IndexError(f"a name has {end - position - 8} bytes")
        return name, end

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self.buffer, position)
        end = position + 8 + length
        if end > len(self.buffer):
            raise IndexError("a string runs past the end of the file")
        return self.buffer[position + 8 : end].decode(), end

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            element, count = struct.unpack_from("<IQ", self.buffer, position)
            return self._array(element, count, position + 12)
        if kind not in _SCALARS:
            raise IndexError(f"unknown value type {kind}")
        layout = "<" + _SCALARS[kind]
        (value,) = struct.unpack_from(layout, self.buffer, position)
        return value, position + struct.calcsize(layout)

    def _array(self, element: int, count: int, position: int) -> tuple["list[str] | array[Any]", int]:
        if count > min(_MAX_ELEMENTS, len(self.buffer) - position):
            raise IndexError(f"an array of {count} elements is longer than the file, or than any in use")
        if element == _ARRAY:
            raise IndexError("an array of arrays: no model has one")
        if element == _STRING:
            strings = []
            for _ in range(count):
                value, position = self._string(position)
                strings.append(value)
            return strings, position
        if element not in _SCALARS:
            raise IndexError(f"unknown value type {element}")
        values = array(_SCALARS[element].replace("?", "B"))  # as small as in the file
        end = position + count * values.itemsize
        if end > len(self.buffer):
            raise IndexError("an array runs past the end of the file")
        values.frombytes(self.buffer[position:end])
        return values, end
