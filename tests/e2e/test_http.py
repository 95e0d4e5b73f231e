"""HTTP on the wire: events, headers, hostile bodies during a stream, metrics."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from support.e2e.metrics_page import Metrics

README = Path(__file__).parents[2] / "README.md"
MODEL = "smollm2"
GOOD: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 4,
    "temperature": 0,
}
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


HOSTILE: list[bytes] = [
    (json.dumps(GOOD)[:-1] + ',"top_p":NaN}').encode(),
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    json.dumps(GOOD | {"messages": [{"role": "user", "content": "word " * 5_000}]}).encode(),
    json.dumps(GOOD | {"user": "x" * (5 << 20)}).encode(),
]


def test_hostile_bodies_during_a_stream(http: httpx.Client) -> None:
    body = GOOD | {"max_tokens": 48, "ignore_eos": True, "stream": True}
    with http.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        for content in HOSTILE:
            assert 400 <= http.post(CHAT, content=content, headers=JSON).status_code < 500
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_events_of_a_stream(http: httpx.Client) -> None:
    body = GOOD | {
        "n": 2,
        "temperature": 1,
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = http.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    assert re.fullmatch(r"(data: .+\n\n)+", answer.text)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] <= 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[-1] in ("stop", "length") and reasons[:-1] == [None] * (len(own) - 1)


def test_the_first_request_of_the_readme_has_a_short_correct_answer(http: httpx.Client) -> None:
    body = re.search(r"-d '(\{.*\})'", README.read_text())
    assert body is not None
    answer = http.post(CHAT, content=body[1].encode(), headers=JSON).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and "Paris" in choice["message"]["content"]
    (model,) = http.get("/v1/models").json()["data"]
    assert model["defaults"] == {"max_tokens": 512, "temperature": 0.0, "top_p": 0.9}
    assert answer["usage"]["completion_tokens"] < 40


def test_health_version_and_docs(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert http.get(path).status_code == 200
        assert http.head(path).status_code == 200
    assert re.match(r"\d+\.\d+", http.get("/version").json()["version"])
    page = http.get("/docs")
    assert page.status_code == 200 and "openapi.json" in page.text
    loaded = re.findall(r"""(?:src|href)=["']?([^"'\s>]+)""", page.text)
    assert loaded and all(path.startswith("/docs/static/") for path in loaded), "nothing comes from outside"
    assert CHAT in http.get("/openapi.json").json()["paths"]


def test_metrics_have_standard_names_and_correct_sums(
    http: httpx.Client, metrics: Callable[[], Metrics], eventually: Callable[..., None]
) -> None:
    before = metrics()
    requests: list[dict[str, int]] = [{"max_tokens": 1}, {"max_tokens": 3, "n": 2}, {"max_tokens": 6}]
    usages = [http.post(CHAT, json=GOOD | options).json()["usage"] for options in requests]
    spent = sum(usage["completion_tokens"] for usage in usages)
    read = sum(usage["prompt_tokens"] for usage in usages)

    def counted() -> bool:
        after = metrics()
        grown = {
            name: after[name] - before[name] for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
        }
        return grown == {"vllm:generation_tokens_total": spent, "vllm:prompt_tokens_total": read}

    eventually(counted, 3, "that the token counters equal the sum of the usages")
    page = metrics()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
    counters = [
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
        *("num_preemptions", "request_success"),
    ]
    seconds = [
        *("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency"),
        "request_queue_time",
    ]
    expected = {f"vllm:{name}" for name in gauges} | {f"vllm:{name}_total" for name in counters}
    expected |= {f"vllm:{name}_seconds_{part}" for name in seconds for part in ("bucket", "sum", "count")}
    assert expected <= page.names()
    for name in expected:
        assert {"model_name", "replica"} <= page.labels(name), name
    assert all(name.startswith(("vllm:", "headrace_")) for name in page.names())
    assert page.value("vllm:request_success_total", model_name=MODEL, replica="smollm2-0") >= 3
    eventually(lambda: metrics().busy == {}, 3, "that nothing is busy")
