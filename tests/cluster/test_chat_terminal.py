"""`headrace chat` in a pseudo-terminal, with a scripted server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.chat_server import ChatServer
from support.cluster.chat_terminal import ALT_ENTER, CTRL_C, CTRL_D, PASTE, UP, ChatTerminal

ANSWER = "Grüß Gott, 世界"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    scripted = ChatServer()
    yield scripted
    scripted.close()


@pytest.fixture
def terminal(server: ChatServer, private_home: Path) -> Iterator[ChatTerminal]:
    chat = ChatTerminal(private_home, server.port)
    yield chat
    chat.close()


def test_a_conversation(server: ChatServer, terminal: ChatTerminal, private_home: Path) -> None:
    def enter(keys: str, reply: str = ANSWER) -> None:
        terminal.type(keys)
        terminal.wait_for(reply)
        terminal.wait_for(">>> ")

    terminal.wait_for(">>> ")
    enter("/help\r", "/retry")
    enter("/hlep\r", "did you mean /help?")
    enter(PASTE.format("eins\rzwei\rdrei") + "\r")
    enter(PASTE.format("x" * 10_000) + "\r")
    enter(UP + UP + "!\r")
    enter(f"a{ALT_ENTER}b\r")
    enter("not sent" + CTRL_C + "/set seed\r", "seed is default")
    enter(CTRL_C, "(Ctrl-D or /bye leaves)")
    terminal.type("count\r")
    terminal.wait_for("1 2 3")
    terminal.type("lost")  # the kernel discards it with Ctrl-C
    enter(CTRL_C + CTRL_C, "(stopped; what is above stays in the conversation")
    assert server.client_left.wait(30), "the connection was not closed"
    assert server.messages == ["eins\nzwei\ndrei", "x" * 10_000, "eins\nzwei\ndrei!", "a\nb", "count"]
    enter("/set stats on\r", "stats is on")
    enter("next\r", "TTFT")
    enter("long\r", "(the limit of tokens is reached; /set max_tokens N changes it)")
    partial = server.requests[-2]["messages"][-2]
    assert partial["role"] == "assistant" and partial["content"].startswith(" 1 2 3")
    assert server.requests[-1]["stream_options"] == {"include_usage": True}
    terminal.type("wait\r")
    terminal.wait_until(lambda: server.messages[-1] == "wait")
    enter(CTRL_C, "(stopped before the answer began; /retry asks again)")
    terminal.type(CTRL_D)
    assert terminal.wait_end() == 0
    assert terminal.modes_now == terminal.modes
    assert (private_home / "chat-history").stat().st_mode & 0o777 == 0o600


def test_the_chat_continues_after_a_failure(server: ChatServer, terminal: ChatTerminal, private_home: Path) -> None:
    terminal.wait_for(">>> ")
    for message, sentence in (
        ("error", "headrace: the server is stopping"),
        ("break", "headrace: the server closed the connection before the answer was complete"),
        ("refuse", "headrace: the prompt is too long"),
    ):
        terminal.type(f"{message}\r")
        terminal.wait_for(sentence)
        terminal.wait_for("/retry asks again)")
        terminal.wait_for(">>> ")
    server.close()
    terminal.type("question\r")
    terminal.wait_for("no server answers at 127.0.0.1")
    terminal.wait_for(">>> ")
    again = ChatServer(server.port)
    try:
        terminal.type("/retry\r")
        terminal.wait_for(ANSWER)
        terminal.wait_for(">>> ")
        assert [request["messages"] for request in again.requests] == [[{"role": "user", "content": "question"}]]
    finally:
        again.close()
    terminal.type("/bye\r")
    assert terminal.wait_end() == 0
    assert "Traceback" not in terminal.received


def test_input_during_an_answer_is_buffered_for_the_prompt(server: ChatServer, terminal: ChatTerminal) -> None:
    terminal.wait_for(">>> ")
    terminal.type("count\r")
    terminal.wait_for("1 2 3")
    terminal.type("y" * 4000 + "\r")
    terminal.wait_for(" 9 ")
    assert "y" not in terminal.plain.partition("count")[2]
    server.end_count.set()
    terminal.wait_for(ANSWER)
    assert server.messages[1:] == ["y" * 4000]


@pytest.mark.parametrize(("variable", "value", "length"), [("NO_COLOR", "1", 10), ("TERM", "dumb", 4200)])
def test_without_colors(server: ChatServer, private_home: Path, variable: str, value: str, length: int) -> None:
    """A dumb terminal has no bracketed paste, but a line of more than 4,095 characters is complete."""
    terminal = ChatTerminal(private_home, server.port, **{variable: value})
    try:
        terminal.wait_for(">>> ")
        terminal.type("x" * length + "\r")
        terminal.wait_for(ANSWER)
        terminal.type("/nothing\r")
        terminal.wait_for("there is no command")
        assert server.messages == ["x" * length]
        for color in ("\x1b[2m", "\x1b[31m", "\x1b[3", "\x1b[4"):
            assert f"{color}m" not in terminal.received and color + "1m" not in terminal.received
        terminal.process.terminate()
        assert terminal.wait_end() == 143
        assert terminal.modes_now == terminal.modes
    finally:
        terminal.close()
