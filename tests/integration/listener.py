"""A client that reads a stream."""

import threading
from typing import Any


class Listener:
    """Reads a stream on a thread of its own, and knows how far it is."""

    def __init__(self, house: Any, prompt: list[int], count: int, options: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.finish: list[str] = []
        self.error: BaseException | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(house, prompt, count, options), daemon=True)
        self._thread.start()

    def reach(self, count: int) -> None:
        """Until so many tokens are out."""
        with self._news:
            assert self._news.wait_for(lambda: self.error or self.finish or len(self.tokens) >= count, 30)

    def end(self) -> tuple[list[int], str, list[str]]:
        self._thread.join(60)
        assert self.error is None and not self._thread.is_alive(), self.error
        return self.tokens, self.text, self.finish

    def _run(self, house: Any, prompt: list[int], count: int, options: dict[str, Any]) -> None:
        try:
            for choice in house.stream(prompt, max_tokens=count, **options):
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
