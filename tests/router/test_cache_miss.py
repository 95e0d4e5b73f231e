"""Each cause of a prompt that was not cached further is named: alone, and over the APIs."""

from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import pytest

from headrace_router.core.cache_miss import Conversation, MissReason, Visits, difference
from headrace_router.core.placement import Decision
from headrace_router.core.replica_blocks import GroupBlocks, PromptBlocks
from headrace_router.text.answer_memory import digest_of, key_after, message_keys
from support.router.fake_replica import TOOL_TEMPLATE

SIZE = 16  # tokens of a block
DECISION = Decision("a", 2, 0)


@dataclass
class Turn:
    """A chat of texts, each of which has four blocks; the first one is the system prompt."""

    texts: tuple[str, ...]
    tools: str = ""
    tenant: bytes = b"tenant"

    @property
    def conversation(self) -> Conversation:
        digests = [digest_of(text) for text in self.texts]
        tools = digest_of(["m", self.tools])
        answers = [*range(2, len(digests), 2)]
        keys = message_keys(key_after(self.tenant, tools), digests)
        return Conversation("m", self.tenant, tools, keys, message_keys(tools, digests), digests, answers, True)

    @property
    def prompt(self) -> dict[Any, PromptBlocks]:
        names = [(self.tools, self.texts[: place + 1], part) for place in range(len(self.texts)) for part in range(4)]
        digests = np.array([hash(name) & (2**63 - 1) for name in names], np.uint64)
        return {None: PromptBlocks(SIZE, (GroupBlocks(0, digests),))}

    @property
    def tokens(self) -> int:
        return 4 * SIZE * len(self.texts)


FIRST = Turn(("system", "user 1"))
SECOND = Turn(("system", "user 1", "answer 1", "user 2"))
THIRD = Turn(("system", "user 1", "answer 1", "user 2", "answer 2", "user 3"))


def _visits(*turns: Turn, there: bool = True) -> Visits:
    visits = Visits(lambda _: there)
    for number, turn in enumerate(turns):
        digest = digest_of(f"answer {len(turn.texts) // 2}")
        answer = digest, key_after(turn.conversation.keys[-1], digest)
        visits.add(f"id{number}", turn.conversation, answer, turn.prompt, ("a", 1))
    return visits


def _miss(visits: Visits, turn: Turn, cached: int, decision: Decision | None = DECISION) -> tuple[str, int] | None:
    found = visits.miss(turn.conversation, turn.prompt, turn.tokens, cached, decision, 100.0)
    return (found.words, found.tokens) if found is not None else None


def test_a_turn_that_has_what_it_can_have_misses_nothing() -> None:
    visits = _visits(FIRST, SECOND)
    assert _miss(visits, THIRD, SECOND.tokens) is None and _miss(visits, THIRD, SECOND.tokens - SIZE) is None
    assert _miss(visits, SECOND, SECOND.tokens - SIZE) is None, "the same turn again"


def test_the_first_visit_and_that_of_another_tenant() -> None:
    assert _miss(_visits(), FIRST, 0) == ("first visit", FIRST.tokens)
    assert _miss(_visits(), FIRST, FIRST.tokens - SIZE) is None, "all of it was cached"
    visits = _visits(FIRST)
    assert _miss(visits, replace(FIRST, tenant=b"other"), 0) == ("another tenant", FIRST.tokens)
    found = visits.miss(replace(FIRST, tenant=b"other").conversation, {}, 64, 0, None, 0.0)
    assert found is not None and found.public == "first visit; tokens=64", "clients are not told of other tenants"


@pytest.mark.parametrize(
    ("changed", "words", "blocks"),
    [
        ({0: "another system"}, "the system prompt changed", 16),
        ({1: "another"}, "message 2 changed", 12),
        ({2: "another"}, "message 3 changed", 8),
        ({3: "another"}, "message 4 changed", 4),
    ],
)
def test_a_message_that_changed_is_named(changed: dict[int, str], words: str, blocks: int) -> None:
    texts = tuple(changed.get(place, text) for place, text in enumerate(THIRD.texts))
    visits = _visits(SECOND)
    cached = SECOND.tokens - blocks * SIZE
    assert _miss(visits, replace(THIRD, texts=texts), cached) == (words, blocks * SIZE)


def test_tools_that_changed_are_named() -> None:
    assert _miss(_visits(SECOND), replace(THIRD, tools="more"), 0) == ("the tools changed", SECOND.tokens)


def test_another_conversation_with_the_same_short_answer_is_a_first_visit() -> None:
    other = Turn(("system 9", "user 9", "answer 2", "user 10"))
    assert _miss(_visits(SECOND), other, 0) == ("first visit", other.tokens)


def test_what_was_cached_and_is_not_any_more() -> None:
    visits = _visits(SECOND)
    assert _miss(visits, THIRD, 64) == ("no longer cached", SECOND.tokens - 64)
    (blocks,) = SECOND.prompt.values()
    visits.dropped(blocks.groups[0].digests[-1:])
    visits.stamp(60.0)
    assert _miss(visits, THIRD, 64) == ("evicted 40 s ago", SECOND.tokens - 64)
    elsewhere = replace(DECISION, most_cached=SECOND.tokens, most_cached_id="b", most_cached_full=True)
    assert _miss(visits, THIRD, 64, elsewhere) == ("on replica b, which was full", SECOND.tokens - 64)
    elsewhere = replace(elsewhere, most_cached_full=False)
    assert _miss(visits, THIRD, 64, elsewhere) == ("on replica b, which was busier", SECOND.tokens - 64)
    assert _miss(_visits(SECOND, there=False), THIRD, 0) == ("on replica a, which is gone", SECOND.tokens)


def test_of_several_turns_with_the_same_answer_the_one_with_the_longest_beginning_counts() -> None:
    visits = _visits(FIRST, replace(FIRST, texts=("another system", "user 1")))
    edited = replace(SECOND, texts=("system", "another", *SECOND.texts[2:]))
    assert _miss(visits, edited, 4 * SIZE) == ("message 2 changed", 4 * SIZE)
    few = visits.miss(edited.conversation, edited.prompt, edited.tokens, edited.tokens - 20, DECISION, 0.0)
    assert few is not None and few.tokens == 20, "no more than the cache did not have"


def test_a_turn_whose_answer_is_not_known_is_a_turn() -> None:
    """As after a stop string; and a message that the answer continues is a part of the answer."""
    visits = Visits(lambda _: True)
    begun = Turn((*FIRST.texts, "answer"))
    visits.add("id0", begun.conversation.without_last(), None, FIRST.prompt, ("a", 1))
    assert _miss(visits, SECOND, 0) == ("no longer cached", FIRST.tokens)
    assert not visits._by_answer and visits.get("id0", b"tenant") is not None


def test_a_template_that_writes_earlier_messages_differently_is_named() -> None:
    visits, other = _visits(SECOND), replace(THIRD, tools="changes the blocks")
    found = visits.miss(THIRD.conversation, other.prompt, THIRD.tokens, 0, DECISION, 0.0)
    assert found is not None and found.reason is MissReason.REWRITTEN and found.tokens == SECOND.tokens


def test_the_table_is_bounded() -> None:
    visits = Visits(lambda _: True, most_bytes=20_000)
    turns = [Turn((f"system {number}", "user 1")) for number in range(40)]
    for number, turn in enumerate(turns):
        digest = digest_of(f"answer {number}")
        end = key_after(turn.conversation.keys[-1], digest)
        visits.add(str(number), turn.conversation, (digest, end), turn.prompt, ("a", 1))
    known = [number for number in range(40) if visits.get(str(number), b"tenant") is not None]
    assert 10 < len(known) < 20 and known[-1] == 39
    assert _miss(visits, turns[0], 0) == ("first visit", 128) and _miss(visits, turns[39], 0) == (
        "no longer cached",
        128,
    )
    assert len(visits._watched) == len(known) and len(visits._by_key) <= 3 * len(known)


def test_a_shorter_turn_is_a_part_of_a_longer_one() -> None:
    visits = _visits(THIRD)
    visit = visits.get("id0", b"tenant")
    assert visit is not None and difference(visit, SECOND.conversation) is None and visits.get("id0", b"other") is None


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text * 20}


def test_headers_metrics_and_explain_name_the_miss(harness: Any, make_replica: Any) -> None:
    replica = make_replica(chat_template=TOOL_TEMPLATE, cache_key=b"k" * 32, max_model_len=4096, reply="Fine. " * 9)
    harness.start([replica])
    turns: list[Any] = [_system("You help. "), {"role": "user", "content": "How are you? " * 9}]

    def ask(client: httpx.Client, cached: int, **more: Any) -> httpx.Response:
        replica.cached_tokens = cached
        body = {"model": "tiny", "messages": turns, **more}
        return client.post("/v1/chat/completions", json=body).raise_for_status()

    header = "x-headrace-cache-miss"
    with harness.client() as client:
        first = ask(client, 0)
        prompt = first.json()["usage"]["prompt_tokens"]
        assert first.headers[header] == f"first visit; tokens={prompt}"
        turns += [first.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        assert header not in ask(client, prompt).headers
        lost = ask(client, 16, stream=True)
        words, _, tokens = lost.headers[header].partition("; tokens=")
        assert words == "no longer cached" and prompt - 48 < int(tokens) < prompt + 99
        turns[0] = _system("You do help. ")
        changed = ask(client, 0)
        assert changed.headers[header].startswith("the system prompt changed; tokens=")
        page = client.get("/metrics").text
        for reason in ("first_visit", "evicted", "system_changed"):
            assert f'headrace_cache_missed_tokens_total{{model_name="tiny",reason="{reason}"}}' in page
    account = harness.router.services.accounts.get(changed.json()["id"])
    assert account.document(0.0)["cache_miss"]["words"] == "the system prompt changed"


def test_anthropics_clients_read_it_as_diagnostics(harness: Any, make_replica: Any) -> None:
    replica = make_replica(chat_template=TOOL_TEMPLATE, cache_key=b"k" * 32, max_model_len=4096, reply="Fine. " * 9)
    harness.start([replica])
    user = {"role": "user", "content": "How are you? " * 9}

    def ask(client: httpx.Client, messages: list[Any], previous: str | None, **more: Any) -> Any:
        body = {"model": "tiny", "max_tokens": 99, "system": "You help. " * 20, "messages": messages, **more}
        answer = client.post("/v1/messages", json=body | {"diagnostics": {"previous_message_id": previous}})
        assert "diagnostics" not in answer.headers.get("x-headrace-ignored-fields", "")
        return answer.raise_for_status().json()

    def reason(answer: Any) -> str:
        kind: str = answer["diagnostics"]["cache_miss_reason"]["type"]
        return kind

    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    with harness.client() as client:
        first = ask(client, [user], None)
        assert first["diagnostics"] is None
        assert harness.router.services.accounts.get(first["id"]) is not None, "`headrace explain` finds it"
        messages: list[Any] = [user, {"role": "assistant", "content": first["content"]}, user]
        assert ask(client, messages, first["id"])["diagnostics"] is None
        assert reason(ask(client, messages, "msg_unknown")) == "previous_message_not_found"
        changed = ask(client, [{**user, "content": "Hm?"}, *messages[1:]], first["id"])
        assert reason(changed) == "messages_changed"
        assert changed["diagnostics"]["cache_miss_reason"]["cache_missed_input_tokens"] > 0
        assert reason(ask(client, messages, first["id"], system="Other.")) == "system_changed"
        assert reason(ask(client, messages, first["id"], tools=tools)) == "tools_changed"
