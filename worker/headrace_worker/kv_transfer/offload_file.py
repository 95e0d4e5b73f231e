"""Blocks of one rank on disk: fixed places in one file, and in another one a record for each that says what it holds.

    kv-NAME-NUMBER.blocks  place p from p * block_bytes on
    kv-NAME-NUMBER.index   place p from p * record_bytes on: a checksum of the record, when it was written, the cache
                           group, the block's hash, a checksum of its bytes, its tokens

A record is written after its block, and both checksums are compared before a block is used: what a crash left, another
replica wrote or a disk has changed counts as absent.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from blake3 import blake3

from headrace_base.errors import HeadraceError, size_text
from headrace_proto.block_hash import HASH_BYTES
from headrace_worker.core.kv.blocks import Content
from headrace_worker.core.transfer.orders import FileBlock

MAX_FILES = 64  # files per folder, rank and model: replicas of one machine
MAX_PARTS = 1024  # buffers in one system call
_HEAD = struct.Struct(f"<16sQI{HASH_BYTES}s16s")  # tokens follow
_SUM = 16  # bytes of a checksum


class OffloadFolderError(HeadraceError):
    """Blocks cannot be kept in the folder of --kv-offload-dir."""


class OffloadFile:
    """Places 1 to `places`. `write` and `read` are thread-safe for different places."""

    def __init__(self, path: Path, places: int, block_bytes: int, block_size: int) -> None:
        """path: without its suffix. block_size: tokens. Raises OSError, as BlockingIOError where it is in use."""
        self.path = path
        self.places = places
        self._block_bytes = block_bytes
        self._record_bytes = _HEAD.size + 4 * block_size
        self._index = os.open(path.with_suffix(".index"), os.O_RDWR | os.O_CREAT, 0o600)
        self._blocks = -1
        try:
            fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blocks = os.open(path.with_suffix(".blocks"), os.O_RDWR | os.O_CREAT, 0o600)
            free, missing = os.fstatvfs(self._blocks), places * block_bytes - os.fstat(self._blocks).st_size
            if missing > free.f_bavail * free.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for file, size in ((self._index, self._record_bytes), (self._blocks, block_bytes)):
                os.ftruncate(file, (places + 1) * size)
                os.posix_fallocate(file, 0, (places + 1) * size)
        except OSError:
            self.close()
            raise

    @classmethod
    def open(cls, folder: str, name: str, first: int, places: int, block_bytes: int, block_size: int) -> Self:
        """The first file from that number on that no other replica uses. name: of the model, the rank and the format.

        Raises OffloadFolderError.
        """
        path = Path(folder).expanduser()
        try:
            if not path.exists():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(first, first + MAX_FILES):
                try:
                    return cls(path / f"kv-{name}-{number % MAX_FILES}", places, block_bytes, block_size)
                except BlockingIOError:
                    continue
        except OSError as error:
            raise OffloadFolderError(
                f"--kv-offload-dir: {path} cannot keep {size_text(places * block_bytes)} of KV blocks of this rank: "
                f"{error.strerror}; give another folder or a smaller --kv-offload-dir-size."
            ) from error
        raise OffloadFolderError(f"--kv-offload-dir: {path} is used by {MAX_FILES} replicas already: give another one.")

    @property
    def number(self) -> int:
        """The number of the file among the files of its name."""
        return int(self.path.name.rsplit("-", 1)[1])

    def contents(self) -> list[tuple[int, Content]]:
        """Places and what their records say, the first written first; of one content the newest."""
        records = sorted(self._records())
        return list({content.digest: (place, content) for _, place, content in records}.values())

    def write(self, block: FileBlock, parts: Sequence[memoryview]) -> None:
        """The bytes of a block, and then its record. Raises OSError."""
        start = block.place * self._block_bytes
        for views in _calls(parts):
            written = os.pwritev(self._blocks, views, start)
            if written != sum(len(view) for view in views):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            start += written
        body = struct.pack("<QI16s16s", time.time_ns(), block.group, block.digest, _checksum(parts)) + block.tokens
        os.pwrite(self._index, blake3(body).digest(_SUM) + body, block.place * self._record_bytes)

    def read(self, block: FileBlock, parts: Sequence[memoryview]) -> bool:
        """Fills `parts`. False: the place does not hold this block. Raises OSError."""
        record = self._record(os.pread(self._index, self._record_bytes, block.place * self._record_bytes))
        if record is None or record[1:3] != (block.group, block.digest) or record[4] != block.tokens:
            return False
        start = block.place * self._block_bytes
        for views in _calls(parts):
            start += os.preadv(self._blocks, views, start)
        return _checksum(parts) == record[3]

    def erase(self, place: int) -> None:
        """The place holds nothing. Raises OSError."""
        os.pwrite(self._index, bytes(self._record_bytes), place * self._record_bytes)

    def close(self) -> None:
        """Another process may use it then."""
        for file in (self._index, self._blocks):
            if file >= 0:
                os.close(file)
        self._index = self._blocks = -1

    def _records(self) -> list[tuple[int, int, Content]]:
        """When it was written, its place, what it says; of all valid ones."""
        size = self._record_bytes
        text = os.pread(self._index, (self.places + 1) * size, 0)
        records = (
            (place, self._record(text[place * size : (place + 1) * size])) for place in range(1, self.places + 1)
        )
        return [
            (record[0], place, Content(record[1], record[2], record[4]))
            for place, record in records
            if record is not None
        ]

    def _record(self, text: bytes) -> tuple[int, int, bytes, bytes, bytes] | None:
        """When it was written, group, hash, checksum of the block, tokens; None where there is no valid one."""
        if len(text) < self._record_bytes or not any(text[:_SUM]) or blake3(text[_SUM:]).digest(_SUM) != text[:_SUM]:
            return None
        _, written, group, digest, checksum = _HEAD.unpack_from(text)
        return written, group, digest, checksum, text[_HEAD.size :]


def _calls(parts: Sequence[memoryview]) -> list[Sequence[memoryview]]:
    return [parts[first : first + MAX_PARTS] for first in range(0, len(parts), MAX_PARTS)]


def _checksum(parts: Sequence[memoryview]) -> bytes:
    summed = blake3()
    for part in parts:
        summed.update(part)
    return summed.digest(_SUM)
