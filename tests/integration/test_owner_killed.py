"""The replica that answers is killed −9 at any token: its streams go on elsewhere as if nothing had been (I1, I2)."""

import threading
from random import Random
from typing import Any

import pytest

LENGTH = 80
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.95, "presence_penalty": 0.4, "logprobs": 1}


class Listener:
    """Reads a stream on a thread of its own, and knows how far it is."""

    def __init__(self, house: Any, prompt: list[int], options: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.finish: list[str] = []
        self.error: BaseException | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(house, prompt, options), daemon=True)
        self._thread.start()

    def reach(self, count: int) -> None:
        """Until so many tokens are out."""
        with self._news:
            assert self._news.wait_for(lambda: self.error or self.finish or len(self.tokens) >= count, 30)

    def end(self) -> tuple[list[int], str, list[str]]:
        self._thread.join(60)
        assert self.error is None and not self._thread.is_alive(), self.error
        return self.tokens, self.text, self.finish

    def _run(self, house: Any, prompt: list[int], options: dict[str, Any]) -> None:
        try:
            for choice in house.stream(prompt, max_tokens=LENGTH, **options):
                with self._news:
                    self.tokens += choice["token_ids"]
                    self.text += choice["text"]
                    self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                    self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
                    self._news.notify_all()
        except BaseException as error:
            self.error = error
            with self._news:
                self._news.notify_all()


@pytest.mark.parametrize("first", range(1, 65, 8))
def test_the_owner_is_killed_at_every_token(first: int, process_house: Any) -> None:
    """Tokens 1 to 64 over the parameters: a greedy and a seeded stream of the same replica, beside others elsewhere."""
    house = process_house
    house.open(await_ready=False, policy="round-robin")
    for name in ("a", "b"):
        house.launch(name)
    house.settle()
    random = Random(first)
    for token in range(first, first + 8):
        prompt = [random.randrange(10, 300) for _ in range(20)]
        undisturbed = [Listener(house, prompt, options) for options in (GREEDY, SEEDED)]
        expected = [listener.end() for listener in undisturbed]
        greedy = Listener(house, prompt, GREEDY)
        greedy.reach(1)
        owner = house.owner()
        other = Listener(house, prompt, SEEDED)  # the next in turn
        other.reach(1)
        seeded = Listener(house, prompt, SEEDED)
        greedy.reach(token)
        house.kill(owner)
        house.launch(owner)
        assert greedy.end() == expected[0], f"greedy, killed at token {token}"
        assert seeded.end() == other.end() == expected[1], f"seeded, killed at token {token}"
        assert len(seeded.logprobs) == LENGTH
        house.settle()
    assert house.migrations >= 8, "most kills came in the middle of both streams"
