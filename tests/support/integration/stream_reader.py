"""A client that reads a stream."""

import threading
from typing import Any


class StreamReader:
    """Reads a stream on a separate thread and records its progress."""

    def __init__(self, cluster: Any, prompt: list[int], count: int, options: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.finish: list[str] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(cluster, prompt, count, options), daemon=True)
        self._thread.start()

    def reach(self, count: int) -> None:
        """Waits until `count` tokens have been received."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.error or self.finish or len(self.tokens) >= count, 30)

    def end(self) -> tuple[list[int], str, list[str]]:
        self._thread.join(60)
        assert self.error is None and not self._thread.is_alive(), self.error
        return self.tokens, self.text, self.finish

    def _run(self, cluster: Any, prompt: list[int], count: int, options: dict[str, Any]) -> None:
        try:
            for choice in cluster.stream(prompt, max_tokens=count, **options):
                with self._changed:
                    self.tokens += choice["token_ids"]
                    self.text += choice["text"]
                    self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                    self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
                    self._changed.notify_all()
        except BaseException as error:
            self.error = error
            with self._changed:
                self._changed.notify_all()
