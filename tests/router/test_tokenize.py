"""/tokenize and /detokenize: what a completion or a chat would send to a replica, and its text."""

from typing import Any

import pytest


def test_a_text_and_a_chat_have_the_tokens_that_replicas_get(harness: Any, make_replica: Any) -> None:
    replica = make_replica()
    harness.start([replica])
    chat = {"messages": [{"role": "user", "content": "Hello wörld"}]}
    with harness.client() as client:

        def tokens(body: dict[str, Any]) -> Any:
            answer = client.post("/tokenize", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello wörld"}).raise_for_status()
        client.post("/v1/chat/completions", json={"model": "tiny", **chat}).raise_for_status()
        text, asked = (list(submit.prompt_token_ids) for submit in replica.submits)
        found = tokens({"model": "tiny", "prompt": "Hello wörld", "return_token_strs": True})
        assert found["tokens"] == text and found["count"] == len(text) and found["max_model_len"] == 256
        assert "".join(found["token_strs"]).startswith("Hello")
        assert tokens({"prompt": "Hello wörld", "add_special_tokens": False})["tokens"] == text, (
            "the model is the only one"
        )
        assert tokens(chat) == {"count": len(asked), "max_model_len": 256, "tokens": asked, "token_strs": None}
        begun = tokens({**chat, "add_generation_prompt": False})["tokens"]
        assert asked[: len(begun)] == begun and len(begun) < len(asked)
        back = client.post("/detokenize", json={"model": "tiny", "tokens": asked})
        assert back.json()["prompt"] == "<|im_start|>user\nHello wörld<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("tokenize", {"model": "tiny"}, "Send 'prompt', a text, or 'messages', a chat"),
        ("tokenize", {"model": "none", "prompt": "x"}, "'none' does not exist"),
        ("tokenize", {"model": "tiny", "prompt": "x", "pieces": True}, "pieces"),
        ("tokenize", {"model": "tiny", "messages": []}, "messages"),
        ("detokenize", {"model": "tiny", "tokens": [99999]}, "holds the token id 99999"),
        ("detokenize", {"model": "tiny", "tokens": ["a"]}, "tokens[0]"),
        ("detokenize", [], "must be a JSON object"),
    ],
)
def test_mistakes_are_one_sentence(shared: Any, path: str, body: Any, said: str) -> None:
    with shared.client() as client:
        answer = client.post(f"/{path}", json=body)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"], answer.text
