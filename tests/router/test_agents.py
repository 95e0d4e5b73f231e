"""Frameworks for agents against the server: each finishes a loop of two steps with a model that answers by a script."""

import json
import os
import subprocess
from typing import Any

import pytest

from support.e2e.foreign import AGENTS, TYPED, foreign_python
from support.router.fake_replica import TOOL_TEMPLATE

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
DONE = "It is 20 °C in Zürich."
OPENAI_AGENTS = """
import asyncio, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
@function_tool
def get_weather(city: str) -> str:
    "The weather of a city."
    return f"20 degrees in {city}"
model = OpenAIChatCompletionsModel(model="tiny", openai_client=AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
agent = Agent(name="weather", instructions="Use the tool.", model=model, tools=[get_weather])
async def main():
    if sys.argv[2] == "stream":
        run = Runner.run_streamed(agent, "What is the weather in Zürich?")
        async for _ in run.stream_events():
            pass
        return run.final_output
    return (await Runner.run(agent, "What is the weather in Zürich?")).final_output
print(asyncio.run(main()))
"""
PYDANTIC = """
import asyncio, sys
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
agent = Agent(OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none")))
@agent.tool_plain
def get_weather(city: str) -> str:
    "The weather of a city."
    return f"20 degrees in {city}"
async def main():
    if sys.argv[2] == "stream":
        async with agent.run_stream("What is the weather in Zürich?") as run:
            return await run.get_output()
    return (await agent.run("What is the weather in Zürich?")).output
print(asyncio.run(main()))
"""
INSTRUCTOR = """
import sys
import instructor, openai, pydantic
class City(pydantic.BaseModel):
    name: str
    inhabitants: int
    @pydantic.field_validator("inhabitants")
    @classmethod
    def check(cls, value):
        assert value > 100_000, "too few"
        return value
client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none"), mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": "Describe Zürich."}]
if sys.argv[2] == "stream":
    found = client.chat.completions.create_partial(model="tiny", messages=messages, response_model=City, max_retries=2)
    print(list(found)[-1])
else:
    print(client.chat.completions.create(model="tiny", messages=messages, response_model=City, max_retries=2))
"""


def _city(inhabitants: int) -> str:
    arguments = json.dumps({"name": "Zürich", "inhabitants": inhabitants}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "City", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize(
    ("script", "replies", "expected"),
    [
        (OPENAI_AGENTS, (CALL, DONE), DONE),
        (PYDANTIC, (CALL, DONE), DONE),
        (INSTRUCTOR, (_city(7), _city(443_037)), "inhabitants=443037"),
    ],
    ids=["openai-agents", "pydantic-ai", "instructor"],
)
def test_a_loop_of_two_steps(
    harness: Any, make_replica: Any, script: str, replies: tuple[str, ...], expected: str, mode: str
) -> None:
    if script is INSTRUCTOR and mode == "stream":
        replies = replies[1:]  # it repeats no streamed answer
    replica = make_replica(replies=replies, chat_template=TOOL_TEMPLATE, max_model_len=8192)
    harness.start([replica])
    python = foreign_python(TYPED if script is INSTRUCTOR else AGENTS)
    command = [str(python), "-c", script, f"{harness.url}/v1", mode]
    environment = os.environ | {"OPENAI_API_KEY": "none", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected in done.stdout
    assert len(replica.submits) == len(replies)
    last = replica.tokenizer.decode(replica.submits[-1].prompt_token_ids, skip_special_tokens=False)
    if len(replies) > 1:
        assert "<tool_call>{" in last and ("20 degrees in Zürich" in last or "too few" in last)
