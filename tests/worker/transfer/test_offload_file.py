"""A rank's file for evicted KV blocks: what is written is found again, and nothing else is taken for it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_worker.core.kv.blocks import Content
from headrace_worker.core.transfer.orders import FileBlock
from headrace_worker.kv_transfer.offload_file import MAX_FILES, OffloadFile, OffloadFolderError

PLACES, BYTES, TOKENS = 5, 96, 4
Open = Callable[..., OffloadFile]


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Open]:
    files: list[OffloadFile] = []

    def make(places: int = PLACES, first: int = 0, folder: Path = tmp_path) -> OffloadFile:
        files.append(OffloadFile.open(str(folder), "model", first, places, BYTES, TOKENS))
        return files[-1]

    yield make
    for file in files:
        file.close()


def block(place: int, number: int) -> FileBlock:
    return FileBlock(0, place, number % 2, bytes([number] * 16), bytes([number] * 4 * TOKENS))


def parts(fill: int) -> list[memoryview]:
    return [memoryview(bytearray([fill + part] * (BYTES // 3))) for part in range(3)]


def content(entry: FileBlock) -> Content:
    return Content(entry.group, entry.digest, entry.tokens)


def test_blocks_are_found_again_by_the_next_process(open_file: Open) -> None:
    first = open_file()
    for place, number in ((3, 7), (1, 8), (2, 9)):
        first.write(block(place, number), parts(number))
    first.write(block(3, 10), parts(10))
    first.close()
    again = open_file()
    assert again.contents() == [(1, content(block(1, 8))), (2, content(block(2, 9))), (3, content(block(3, 10)))]
    read = parts(0)
    assert again.read(block(3, 10), read) and read == parts(10)
    again.write(block(1, 11), parts(11))
    assert [place for place, _ in again.contents()] == [2, 3, 1], "the one written last is the last"


def test_another_block_than_the_one_that_is_named_is_not_read(open_file: Open) -> None:
    file = open_file()
    file.write(block(1, 7), parts(7))
    assert not file.read(block(1, 8), parts(0))
    assert not file.read(block(2, 7), parts(0)), "nothing was written there"
    other = block(1, 7)
    assert not file.read(FileBlock(0, 1, other.group, other.digest, bytes(4 * TOKENS)), parts(0)), "other tokens"


@pytest.mark.parametrize("offset", [0, 50, BYTES - 1])
def test_a_damaged_block_is_not_used(open_file: Open, offset: int) -> None:
    file = open_file()
    file.write(block(2, 7), parts(7))
    with open(file.path.with_suffix(".blocks"), "r+b") as damaged:
        damaged.seek(2 * BYTES + offset)
        damaged.write(b"\xff")
    assert not file.read(block(2, 7), parts(0))


@pytest.mark.parametrize("offset", [0, 16, 30, 50, 70])
def test_a_damaged_record_is_not_used(open_file: Open, offset: int) -> None:
    file = open_file()
    file.write(block(2, 7), parts(7))
    index = file.path.with_suffix(".index")
    record = index.stat().st_size // (PLACES + 1)
    with open(index, "r+b") as damaged:
        damaged.seek(2 * record + offset)
        damaged.write(b"\xff\xee")
    assert not file.read(block(2, 7), parts(0)) and file.contents() == []


def test_a_file_that_was_made_smaller_keeps_what_has_a_place(open_file: Open) -> None:
    first = open_file()
    for place in (1, 5):
        first.write(block(place, place), parts(place))
    first.close()
    smaller = open_file(places=2)
    assert [place for place, _ in smaller.contents()] == [1]
    assert smaller.path.with_suffix(".blocks").stat().st_size == 3 * BYTES
    smaller.close()
    assert [place for place, _ in open_file().contents()] == [1]


def test_each_replica_of_a_machine_has_a_file_of_its_own(open_file: Open) -> None:
    first, second, third = open_file(), open_file(), open_file(first=5)
    assert [file.number for file in (first, second, third)] == [0, 1, 5]
    first.close()
    assert open_file().number == 0


def test_a_folder_that_cannot_be_used_is_refused_with_a_sentence(open_file: Open, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffloadFolderError, match=r"file cannot keep 0.0 MiB .*: Not a directory; give another folder"):
        open_file(folder=tmp_path / "file")
    free = os.statvfs(tmp_path)
    with pytest.raises(OffloadFolderError, match="No space left on device"):
        open_file(places=2 * free.f_bavail * free.f_frsize // BYTES)
    kept = [open_file() for _ in range(MAX_FILES)]
    with pytest.raises(OffloadFolderError, match="is used by 64 replicas already"):
        open_file()
    assert len(kept) == MAX_FILES
