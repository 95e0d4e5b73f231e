"""`headrace chat` in a pseudo-terminal, with a scripted server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.chat_server import ChatServer
from support.cluster.chat_terminal import CTRL_C, CTRL_D, ESC_ENTER, PASTE, UP, ChatTerminal

ANSWER = "Grüß [31mGott, 世界"  # its control characters are removed
PROMPT = ">>> "


@pytest.fixture
def server() -> Iterator[ChatServer]:
    scripted = ChatServer()
    yield scripted
    scripted.close()


@pytest.fixture
def terminal(server: ChatServer, private_home: Path) -> Iterator[ChatTerminal]:
    chat = ChatTerminal(private_home, server.port)
    chat.wait_for(PROMPT)
    yield chat
    chat.close()


def test_a_conversation(server: ChatServer, terminal: ChatTerminal, private_home: Path) -> None:
    terminal.type("/he\t\r", "/retry", PROMPT)
    terminal.type("/hlep\r", "there is no command /hlep", PROMPT)
    terminal.type(PASTE.format("eins\rzwei\rdrei") + "\r", ANSWER, PROMPT)
    terminal.type(PASTE.format("x" * 10_000) + "\r", ANSWER, PROMPT)
    terminal.type(UP + UP + "!\r", ANSWER, PROMPT)
    terminal.type(f"a{ESC_ENTER}b\r", ANSWER, PROMPT)
    terminal.type("not sent" + CTRL_C + "/set seed\r", "seed is default", PROMPT)
    terminal.type("count\r", "1 2 3")
    terminal.type(CTRL_C, "(stopped; /retry asks again)", PROMPT)
    assert server.client_left.wait(30), "the connection was not closed"
    assert server.messages == ["eins\nzwei\ndrei", "x" * 10_000, "eins\nzwei\ndrei!", "a\nb", "count"]
    terminal.type("/set stats on\r", "stats is on", PROMPT)
    terminal.type("next\r", "3 tokens", "prompt 57 tokens, 48 cached", PROMPT)
    partial = server.requests[-1]["messages"][-2]
    assert partial["role"] == "assistant" and partial["content"].startswith(" 1 2 3")
    terminal.type("long\r", "(the limit of tokens is reached; /set max_tokens N changes it)", PROMPT)
    assert "\x1b[2m" in terminal.received and "\x1b[31mheadrace: " in terminal.received
    terminal.type(CTRL_D)
    assert terminal.wait_end() == 0
    assert (private_home / "chat-history").stat().st_mode & 0o777 == 0o600


def test_the_chat_continues_after_a_failure(server: ChatServer, terminal: ChatTerminal) -> None:
    terminal.type("error\r", "headrace: the server is stopping", PROMPT)
    terminal.type("break\r", "headrace: the server closed the connection before the answer was complete", PROMPT)
    terminal.type("refuse\r", "headrace: the prompt is too long", PROMPT)
    terminal.type("question\r", ANSWER, PROMPT)
    terminal.type("/retry\r", ANSWER, PROMPT)
    assert [request["messages"] for request in server.requests[-2:]] == [[{"role": "user", "content": "question"}]] * 2
    server.close()
    terminal.type("no answer\r", "headrace: no server answers at 127.0.0.1", PROMPT)
    terminal.type(CTRL_C)
    assert terminal.wait_end() == 0
    assert "Traceback" not in terminal.plain


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_without_colors(server: ChatServer, private_home: Path, variable: str, value: str) -> None:
    terminal = ChatTerminal(private_home, server.port, **{variable: value})
    try:
        terminal.wait_for(PROMPT)
        terminal.type("x" * 200 + "\r", ANSWER, PROMPT)
        terminal.type("/nothing\r", "there is no command", PROMPT)
        assert server.messages == ["x" * 200]
        assert "\x1b[2m" not in terminal.received and "\x1b[31m" not in terminal.received
    finally:
        terminal.close()
