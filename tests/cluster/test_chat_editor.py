"""The prompt of `headrace chat`: keys in, entries out."""

from collections.abc import Iterator

import pytest
from prompt_toolkit.input import PipeInput
from prompt_toolkit.input.defaults import create_pipe_input
from prompt_toolkit.output import DummyOutput

from headrace_cluster.cli.chat.editor import Editor
from headrace_cluster.cli.chat.history import open_history

PASTE = "\x1b[200~{}\x1b[201~"
LEFT, UP, ALT_ENTER = "\x1b[D", "\x1b[A", "\x1b\r"


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


@pytest.fixture
def editor(keyboard: PipeInput) -> Editor:
    return Editor(open_history(), lambda: ["tiny", "small"], keyboard=keyboard, screen=DummyOutput())


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ("Hallo\r", "Hallo"),
        (f"Halo{LEFT}l\r", "Hallo"),
        (PASTE.format("eins\r\nzwei\rdrei") + "\r", "eins\nzwei\ndrei"),
        (PASTE.format("x" * 10_000) + "\r", "x" * 10_000),
        (PASTE.format("a\\") + "b\r", "a\\b"),
        (f"eins{ALT_ENTER}zwei\r", "eins\nzwei"),
        ("eins\\\rzwei\\\rdrei\r", "eins\nzwei\ndrei"),
        ('"""eins\rzwei\r"""\r', '"""eins\nzwei\n"""'),
        ("/he\t\r", "/help"),
        ("/model s\t\r", "/model small"),
        ("/set temp\t0.5\r", "/set temperature0.5"),
        ("he\t\r", "he"),
        ("typed\x03", ""),
        ("世界\r", "世界"),
    ],
)
def test_keys_make_an_entry(editor: Editor, keyboard: PipeInput, keys: str, entry: str) -> None:
    keyboard.send_text(keys)
    assert editor.read() == entry


def test_ctrl_c_and_ctrl_d_on_an_empty_line(editor: Editor, keyboard: PipeInput) -> None:
    keyboard.send_text("\x03")
    with pytest.raises(KeyboardInterrupt):
        editor.read()
    keyboard.send_text("ab\x01\x04\r")
    assert editor.read() == "b", "within a line Ctrl-D deletes"
    keyboard.send_text("\x04")
    with pytest.raises(EOFError):
        editor.read()


def test_entries_of_earlier_chats_can_be_recalled(editor: Editor, keyboard: PipeInput) -> None:
    keyboard.send_text("eins\rzwei\r")
    assert [editor.read(), editor.read()] == ["eins", "zwei"]
    later = Editor(open_history(), lambda: [], keyboard=keyboard, screen=DummyOutput())
    keyboard.send_text(f"{UP}{UP}!\r")
    assert later.read() == "eins!"


def test_bytes_that_are_not_utf_8_are_replaced(editor: Editor, keyboard: PipeInput) -> None:
    keyboard.send_bytes(b"a\xffb\r")
    assert editor.read().encode() == "a\ufffdb".encode()
