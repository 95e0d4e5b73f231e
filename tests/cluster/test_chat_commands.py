"""The pure parts of `headrace chat`: entries, commands, settings, files, line breaks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_cluster.cli.chat.answer_meter import AnswerMeter
from headrace_cluster.cli.chat.chat_settings import ChatSettings
from headrace_cluster.cli.chat.commands import COMMANDS, Commands, Next
from headrace_cluster.cli.chat.completion import complete_words
from headrace_cluster.cli.chat.conversation import Conversation
from headrace_cluster.cli.chat.entry import Command, Message, is_unfinished, parse_entry
from headrace_cluster.cli.chat.history import MAX_ENTRY_BYTES, MAX_FILE_BYTES, ChatHistory, open_history
from headrace_cluster.cli.chat.word_wrap import WordWrap, wrap_text
from headrace_proto.errors import HeadraceError


class Models:
    def models(self) -> list[str]:
        return ["tiny", "small"]

    def defaults(self, model: str) -> dict[str, float]:
        return {"max_tokens": 512} if model == "small" else {}


class Chat:
    """A conversation with its commands."""

    def __init__(self) -> None:
        self.conversation = Conversation("tiny")
        self.settings = ChatSettings()
        self.commands = Commands(self.conversation, self.settings, Models())

    def run(self, line: str) -> str:
        """The output of the command, or the sentence of its error."""
        entry = parse_entry(line)
        assert isinstance(entry, Command)
        try:
            return self.commands.run(entry).text
        except HeadraceError as error:
            return f"error: {error}"

    def turn(self, question: str, answer: str) -> None:
        self.conversation.pending = question
        self.conversation.add_answer(answer)


@pytest.fixture
def chat() -> Chat:
    return Chat()


@pytest.mark.parametrize(
    ("entry", "parsed"),
    [
        ("", None),
        (" \n ", None),
        ("Hallo ", Message("Hallo")),
        ("\n  eins\n  zwei\n", Message("  eins\n  zwei")),
        ("/help", Command("help", "")),
        ("/set  seed 7 ", Command("set", "seed 7")),
        ("/", Command("", "")),
        ("/ x", Command("", "x")),
        ("//usr/bin is what?", Message("/usr/bin is what?")),
        (" /usr/bin is what?", Message("/usr/bin is what?")),
        ("/usr/bin is what?", Command("usr/bin", "is what?")),
        ('"""\n /a\nb\n"""', Message(" /a\nb")),
        ('"""one"""', Message("one")),
        ('"""', Message('"""')),
        ('"""doc."""\nx = """y"""', Message('"""doc."""\nx = """y"""')),
        ('/system """a\nb"""', Command("system", "a\nb")),
    ],
)
def test_an_entry_is_a_message_or_a_command(entry: str, parsed: Message | Command | None) -> None:
    assert parse_entry(entry) == parsed


@pytest.mark.parametrize(
    ("entry", "unfinished"),
    [('"""', True), ('"""a\nb', True), ('"""a"""', False), ('/system """a', True), ('a """', False), ('//"""', False)],
)
def test_a_block_is_unfinished_until_its_quotes_close(entry: str, unfinished: bool) -> None:
    assert is_unfinished(entry) is unfinished


def test_every_command_is_in_the_help_within_80_columns(chat: Chat) -> None:
    text = chat.run("/help")
    assert text == chat.run("/?") and all(entry.usage in text for entry in COMMANDS)
    assert max(len(line) for line in text.splitlines()) <= 80
    for entry in COMMANDS:
        assert "no command" not in chat.run(f"/{entry.name}")


def test_an_unknown_command_is_one_sentence(chat: Chat) -> None:
    assert chat.run("/clera").startswith("error: there is no command /clera; did you mean /clear?")
    assert "/help lists them" in chat.run("/usr/bin/env python")
    assert "put // or a space first" in chat.run("/usr/bin/env python")


def test_the_names_of_bye(chat: Chat) -> None:
    for name in ("bye", "exit", "quit"):
        assert chat.commands.run(Command(name, "")).next is Next.END


def test_clear_keeps_the_system_message_and_the_settings(chat: Chat) -> None:
    chat.run("/system be brief")
    chat.run("/set seed 7")
    chat.turn("a", "b")
    chat.run("/clear")
    assert chat.conversation.request_messages() == [{"role": "system", "content": "be brief"}]
    assert chat.settings.request_fields() == {"seed": 7}
    assert chat.run("/system") == "system message: be brief"
    assert chat.run("/system none") == "There is no system message."


@pytest.mark.parametrize(
    ("line", "reply", "fields"),
    [
        ("/set temperature 0.5", "temperature is 0.5", {"temperature": 0.5}),
        ("/set max_tokens 9", "max_tokens is 9", {"max_completion_tokens": 9}),
        ("/set temperature 3", "error: temperature cannot be 3: it must be less than or equal to 2", {}),
        ("/set top_p 0", "error: top_p cannot be 0: it must be greater than 0", {}),
        ("/set top_p 0,5", "error: top_p cannot be 0,5: it must be a valid number", {}),
        ("/set min_p NaN", "error: min_p cannot be NaN: it must be a finite number", {}),
        ("/set seed 1.5", "error: seed cannot be 1.5: it must be a valid integer", {}),
        ("/set max_tokens 0", "error: max_tokens cannot be 0: it must be greater than or equal to 1", {}),
        ("/set stats maybe", "error: stats is on or off, not maybe", {}),
        ("/set top_k", "top_k is default", {}),
    ],
)
def test_set_accepts_what_the_api_accepts(chat: Chat, line: str, reply: str, fields: dict[str, object]) -> None:
    assert chat.run(line) == reply
    assert chat.settings.request_fields() == fields


def test_set_shows_and_resets(chat: Chat) -> None:
    chat.run("/set seed 7")
    chat.run("/set stats on")
    rows = dict(line.split() for line in chat.run("/set").splitlines())
    assert (rows["seed"], rows["stats"], rows["temperature"]) == ("7", "on", "default")
    assert chat.run("/set seed default") == "seed is default"
    assert chat.settings.request_fields() == {}
    for line in ("/set seeds 7", "/set seeds"):
        assert chat.run(line).startswith("error: there is no setting seeds; there are: temperature, top_p")


def test_model_lists_and_changes(chat: Chat) -> None:
    chat.turn("a", "b")
    assert chat.run("/model") == "* tiny\n  small"
    assert chat.run("/model huge") == "error: the server has no model huge; it has: tiny, small"
    chat.run("/model small")
    assert chat.run("/set max_tokens") == "max_tokens is default (512)", "as the server lists it"
    assert (chat.conversation.model, len(chat.conversation.messages)) == ("small", 2)


def test_retry_sends_the_last_message_again(chat: Chat) -> None:
    assert chat.run("/retry") == "error: there is no message to ask again"
    chat.turn("a", "b")
    chat.turn("c", "d")
    assert chat.commands.run(Command("retry", "")).next is Next.ANSWER
    assert [message["content"] for message in chat.conversation.request_messages()] == ["a", "b", "c"]
    assert chat.commands.run(Command("retry", "")).next is Next.ANSWER, "the answer failed again"
    assert [message["content"] for message in chat.conversation.request_messages()] == ["a", "b", "c"]


def test_a_saved_conversation_is_a_request_and_can_be_loaded(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "a b.json"
    assert chat.run(f"/save {path}") == "error: there is nothing to save yet"
    chat.run("/system be brief")
    chat.run("/set max_tokens 9")
    chat.turn("Grüße", "世界")
    assert str(path) in chat.run(f"/save {path}")
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "Grüße"},
            {"role": "assistant", "content": "世界"},
        ],
        "max_completion_tokens": 9,
    }
    other = Chat()
    assert other.run(f"/load {path}") == f"2 messages from {path}."
    assert other.conversation == chat.conversation
    assert other.settings.request_fields() == {"max_completion_tokens": 9}


def test_save_replaces_a_file_on_request_only(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("precious")
    chat.turn("a", "b")
    assert chat.run(f"/save {path}").startswith(f"error: {path} exists; choose another name")
    assert path.read_text() == "precious"
    chat.run(f"/save --force {path}")
    assert json.loads(path.read_text())["messages"][0] == {"role": "user", "content": "a"}
    for line in (
        "/save",
        "/save --force",
        f"/save {tmp_path}",
        f"/save {tmp_path}/no/such",
        "/save a\0b",
        "/load ~no-such-user/a",
    ):
        assert chat.run(line).startswith("error: "), line
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "one JSON object"),
        ("{}", "no list of messages"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": [{"role": "user"}]}', "a role and a content"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "a role and a content"),
        ('{"messages": [{"role": "user", "content": "x"}], "seed": "x"}', "seed cannot be x"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "its tools are no list"),
    ],
)
def test_a_file_that_cannot_be_loaded_changes_nothing(chat: Chat, tmp_path: Path, content: str, words: str) -> None:
    chat.turn("a", "b")
    chat.run("/set seed 7")
    path = tmp_path / "file"
    path.write_text(content)
    reply = chat.run(f"/load {path}")
    assert reply.startswith(f"error: {path} ") and words in reply
    assert len(chat.conversation.messages) == 2 and chat.settings.request_fields() == {"seed": 7}
    assert chat.run(f"/load {tmp_path}/none").startswith("error: ")


def test_half_a_surrogate_pair_can_be_loaded_and_saved(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"messages": [{"role": "user", "content": "x\\ud800"}]}')
    chat.run(f"/load {tmp_path}/a")
    chat.run(f"/save {tmp_path}/b")
    assert json.loads((tmp_path / "b").read_text())["messages"] == [{"role": "user", "content": "x?"}]


def test_a_loaded_message_without_an_answer_can_be_retried(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"model": "huge", "messages": [{"role": "user", "content": "x"}]}')
    reply = chat.run(f"/load {path}")
    assert "/retry asks it" in reply and "they were with huge, the model here is tiny" in reply
    assert chat.commands.run(Command("retry", "")).next is Next.ANSWER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/s", ["/system", "/set", "/show", "/save"]),
        ("/set t", ["temperature", "top_p", "top_k"]),
        ("/set stats o", ["on", "off"]),
        ("/model ", ["tiny", "small"]),
        ("hel", []),
        ("say /s", []),
        ("/help x", []),
    ],
)
def test_tab_completes_commands_only(text: str, words: list[str]) -> None:
    assert complete_words(text, ["tiny", "small"]) == words


def test_history_is_private_bounded_and_skips_invalid_lines(private_home: Path) -> None:
    history = open_history()
    path = private_home / "chat-history"
    for entry in ("eins", "zwei\ndrei", "x" * MAX_ENTRY_BYTES):
        history.append_string(entry)
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("a") as file:
        file.write('{"no": "entry"}\n"cut o')
    path.chmod(0o644)
    assert list(open_history().load_history_strings()) == ["zwei\ndrei", "eins"]
    assert path.stat().st_mode & 0o777 == 0o600
    lines = (json.dumps(f"{number} {'y' * 1000}") + "\n" for number in range(2 * MAX_FILE_BYTES // 1000))
    path.write_text("".join(lines))
    newest = next(iter(open_history().load_history_strings()))
    assert newest.startswith(f"{2 * MAX_FILE_BYTES // 1000 - 1} ")
    assert path.stat().st_size <= MAX_FILE_BYTES // 2
    unwritable = ChatHistory(private_home / "no" / "folder")
    unwritable.append_string("kept for this chat")
    assert unwritable.get_strings() == ["kept for this chat"]


def test_the_meter_counts_from_the_first_token() -> None:
    times = iter((10.0, 10.5, 11.5, 12.0))
    clock: Callable[[], float] = lambda: next(times)  # noqa: E731
    meter = AnswerMeter(clock)
    meter.record_text()
    meter.record_text()
    usage = {"prompt_tokens": 57, "completion_tokens": 21, "prompt_tokens_details": {"cached_tokens": 48}}
    assert meter.summary(usage) == "21 tokens in 2.00 s, 20.0 tok/s, TTFT 0.50 s; prompt 57 tokens, 48 cached"
    assert AnswerMeter(lambda: 1.0).summary(None) == "0.00 s, no text; the server sent no token counts"


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("one two three four five", "one two three four\nfive"),
        ("exactly twenty chars\nnext", "exactly twenty chars\nnext"),
        ("exactly twenty chars next", "exactly twenty chars\nnext"),
        ("    indented\n\n  code", "    indented\n\n  code"),
        ("a-word-of-more-than-twenty-columns", "a-word-of-more-than-\ntwenty-columns"),
        ("漢字" * 6, "漢字" * 5 + "\n漢字"),
        ("red \x1b[31mtext\x07\x9b1m", "red [31mtext1m"),
    ],
)
def test_lines_break_between_words(text: str, wrapped: str) -> None:
    assert wrap_text(text, 20) == wrapped
    by_character = WordWrap(20)
    assert "".join(by_character.feed(character) for character in text) + by_character.finish() == wrapped
