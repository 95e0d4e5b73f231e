"""What a prompt misses of its cache, injected one by one with real replicas: each cause is named right."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.e2e.headrace_process import Serve, headrace

pytestmark = pytest.mark.faults("serve")

KEYS = ("key-of-the-first-tenant", "key-of-the-second-tenant")
HEADER = "x-headrace-cache-miss"
LONG = "The rules of this house fill a page. "


def _chat(*texts: str) -> list[dict[str, str]]:
    roles = ("system", *("user", "assistant") * len(texts))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_four_causes_are_named(tmp_path: Path, start: Callable[..., Serve], eventually: Callable[..., None]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(f"{name}:{key}" for name, key in zip("ab", KEYS, strict=True)))
    keys.chmod(0o600)
    serve = start(
        "--replicas", "2", "--cpu-threads", "1", "--kv-cache-memory", "64MiB", "--max-model-len", "1024",
        "--api-keys-file", str(keys),
    ).await_ready()  # fmt: skip

    def ask(messages: list[dict[str, str]], key: str = KEYS[0]) -> httpx.Response:
        body: dict[str, Any] = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0}
        headers = {"authorization": f"Bearer {key}"}
        url = f"{serve.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).raise_for_status()

    def explained(response: httpx.Response) -> Any:
        return json.loads(headrace(serve.home, "explain", response.json()["id"], "--json").stdout)

    conversation = [LONG * 40, "Who are you?"]
    first = ask(_chat(*conversation))
    assert first.headers[HEADER].startswith("first visit")
    conversation += [first.json()["choices"][0]["message"]["content"], "And who am I?"]
    second = ask(_chat(*conversation))
    assert HEADER not in second.headers and explained(second)["cache_miss"] is None
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 64

    foreign = ask(_chat(*conversation), KEYS[1])
    assert foreign.headers[HEADER].startswith("first visit")
    assert explained(foreign)["cache_miss"]["reason"] == "another_tenant"

    changed = ask(_chat(conversation[0], "What are you?", *conversation[2:]))
    assert changed.headers[HEADER].startswith("message 2 changed")

    for number in range(12):  # the caches of both replicas are full several times
        ask(_chat(f"{number} " + LONG * 60, "Hello"))
    dropped = ask(_chat(*conversation))
    assert explained(dropped)["cache_miss"]["reason"] == "evicted" and " s ago; tokens=" in dropped.headers[HEADER]

    holder = explained(dropped)["decisions"][0]["replica_id"]
    ranks = next(replica["ranks"] for replica in serve.status()["replicas"] if replica["id"] == holder)
    os.kill(ranks[0]["pid"], signal.SIGKILL)
    eventually(lambda: holder not in {one["id"] for one in serve.status()["replicas"] if one["state"] == "ready"}, 30)
    gone = ask(_chat(*conversation))
    assert gone.headers[HEADER].startswith(f"on replica {holder}, which is gone")
