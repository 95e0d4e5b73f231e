"""`headrace chat`: a conversation on the terminal, or one answer."""

import sys
from typing import Any

from headrace_cluster.cli.client import ApiClient, ServerError

_HELP = "Ctrl-C ends an answer, Ctrl-D the chat; /clear begins anew"


class Chat:
    """Keeps the messages; answers go to stdout, all else to stderr."""

    def __init__(
        self,
        client: ApiClient,
        *,
        model: str | None,
        system: str | None,
        max_tokens: int | None,
        temperature: float | None,
    ) -> None:
        self._client = client
        self._model = model or self._first_model()
        self._system = [{"role": "system", "content": system}] if system else []
        options = {"max_completion_tokens": max_tokens, "temperature": temperature}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._messages: list[dict[str, str]] = []

    def once(self, text: str) -> None:
        """One question, one answer on stdout."""
        self._messages = [{"role": "user", "content": text}]
        self._answer()

    def talk(self) -> None:
        """Until the input ends."""
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        interactive = sys.stdin.isatty()
        if interactive:
            console.print(f"[bold]{self._model}[/bold]  [dim]{_HELP}[/dim]")
        while True:
            if interactive:
                console.print("[bold cyan]>[/bold cyan] ", end="")
            try:
                line = input().strip()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    console.print()
                return
            if line == "/clear":
                self._messages = []
            elif line in ("/exit", "/quit"):
                return
            elif line:
                self._turn(line, console)

    def _turn(self, line: str, console: Any) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except KeyboardInterrupt:
            console.print("\n[dim](stopped)[/dim]")
            self._messages.pop()
        except ServerError as error:
            console.print(f"headrace: {error}", style="red", markup=False)
            self._messages.pop()
        else:
            self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        body: dict[str, Any] = {"model": self._model, "messages": self._system + self._messages} | self._options
        pieces = []
        for text in self._client.chat(body):
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return "".join(pieces)

    def _first_model(self) -> str:
        models = self._client.models()
        if not models:
            raise ServerError("the server has no model yet; wait until it is ready (headrace status)")
        return models[0]
