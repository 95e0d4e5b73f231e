"""A chat with a model that keeps recurrent state: a tiny Qwen3.5 checkpoint with a vision tower, on two replicas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from support.e2e.headrace_process import Serve, headrace
from support.ranks.families import tiny_options
from support.worker.tiny_models import save_random

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = " ".join(f"Rule {number}: answer in one sentence." for number in range(40))
pytestmark = pytest.mark.faults("serve")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    options = tiny_options("qwen3_5")
    options["text_config"] |= {"max_position_embeddings": 8192, "vocab_size": 300}
    folder = save_random(options, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_reasoning_ends_after_the_tokens_that_it_may_have(tmp_path: Path, start: Callable[..., Serve]) -> None:
    """A random model would not end it. Its <think> and </think> are tokens that are not special, as Qwen3's."""
    folder = save_random(tiny_options("qwen3"), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}")
    serve = start(
        str(folder), "--served-model-name", "qwen", "--cpu-threads", "1", "--dtype", "float32", "--kv-cache-memory",
        "16MiB",
    ).await_ready()  # fmt: skip
    asked: dict[str, Any] = {"model": "qwen", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    with httpx.Client(base_url=serve.url, timeout=60, trust_env=False) as client:
        for most in (0, 1, 7):
            body = {**asked, "max_reasoning_tokens": most, "seed": 1, "min_tokens": 15}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == most
            assert answer["choices"][0]["message"]["content"], answer
        thinking = {"type": "enabled", "budget_tokens": 3}
        message = client.post("/v1/messages", json={**asked, "thinking": thinking}).raise_for_status()
        assert message.json()["content"][0]["type"] == "thinking" and message.json()["usage"]["output_tokens"] > 4
        assert "x-headrace-ignored-fields" not in message.headers


def test_each_turn_starts_from_the_snapshot_of_the_one_before(folder: Path, start: Callable[..., Serve]) -> None:
    serve = start(
        str(folder), "--served-model-name", "qwen", "--replicas", "2", "--cpu-threads", "1", "--dtype", "float32",
        "--kv-cache-memory", "64MiB",
    ).await_ready()  # fmt: skip
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    with httpx.Client(base_url=serve.url, timeout=60, trust_env=False) as client:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            body = {"model": "qwen", "messages": messages, "max_tokens": 24, "temperature": 0, "seed": 1}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            usage = answer["usage"]
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]
            account = json.loads(headrace(serve.home, "explain", answer["id"], "--json").stdout)
            assert account["snapshot_tokens"] == account["cached_tokens"] <= account["covered_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        shown = headrace(serve.home, "explain", answer["id"]).stdout
        assert f"started from a snapshot of recurrent state after {account['snapshot_tokens']} tokens" in shown
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        refused = client.post(
            "/v1/chat/completions", json={"model": "qwen", "messages": [{"role": "user", "content": [image]}]}
        )
        assert refused.status_code == 400 and "text" in refused.json()["error"]["message"]
