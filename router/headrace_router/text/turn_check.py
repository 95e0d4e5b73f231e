"""Whether a chat template writes the next turn of a conversation as an extension of the last one.

Where it does not, as templates that drop the reasoning of earlier turns, the KV blocks from there on are computed again
with each turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_router.text.chat_template import ChatTemplateError

_AT = {"at": {"type": "string", "description": "A place."}}
_TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": _AT, "required": ["at"]},
}
_USER = {"role": "user", "content": "What is it?"}
_AGAIN = {"role": "user", "content": "And now?"}

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""The text of messages with these variables of the template. Raises ChatTemplateError."""


def parted_texts(
    render: Render, messages: Sequence[Mapping[str, Any]], turn: int, options: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The texts that part: of the turn, whose last message is the assistant's, and of the next one; None if it extends.

    turn: messages of the turn before its answer; two more are in the next one.
    """
    prompt = render(messages[:turn], options)
    answered = render(messages[: turn + 1], {**options, "add_generation_prompt": False}).rstrip()
    if not answered.startswith(prompt.rstrip()):
        return prompt, answered
    later = render(messages[: turn + 2], options)
    return None if later.startswith(answered) else (answered, later)


def turn_problem(
    render: Render, encode: Callable[[str], Sequence[int]], token: Callable[[int], str], *, tools: bool, reasons: bool
) -> str:
    """A sentence with the token where the next turn parts from the last one; empty where it extends it.

    tools, reasons: whether the model's answers are known to have calls, and reasoning.
    """
    thought = {"reasoning_content": "Look."} if reasons else {}
    answer = {"role": "assistant", "content": "A box.", **thought}
    loops: list[tuple[str, list[Mapping[str, Any]], Mapping[str, Any]]] = [("the user", [_USER, answer, _AGAIN], {})]
    if tools:
        loop: list[Mapping[str, Any]] = [_USER]
        for ident in ("call00001", "call00002"):
            call = {"id": ident, "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
            loop.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
            loop.append({"role": "tool", "tool_call_id": ident, "name": "look", "content": "A box."})
        loops.insert(0, ("a tool", loop, {"tools": [{"type": "function", "function": _TOOL}]}))
    for name, messages, options in loops:
        for turn in range(1, len(messages) - 1, 2):
            try:
                parted = parted_texts(render, messages, turn, options)
            except ChatTemplateError:
                break  # it does not take such messages
            if parted is not None:
                before, after = (encode(text) for text in parted)
                place = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
                old, new = (repr(token(ids[place])) if place < len(ids) else "the end" for ids in (before, after))
                return (
                    f"the chat template writes an earlier turn differently once {name} has answered: token {place} was "
                    f"{old}, and is {new}; what follows is computed again with each turn"
                )
    return ""
