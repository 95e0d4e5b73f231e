"""`headrace explain`: where the time of a request went, and why its replica was chosen."""

import json
from collections.abc import Iterator
from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import ServerError
from headrace_proto.quantities import counted

SHOWN_SECONDS = 0.0005  # of a cause


def explain_request(choice: ServerChoice, request: str, *, as_json: bool) -> None:
    """Raises NotRunningError; ServerError with the sentence of the server."""
    document = AdminClient(choice).call("POST", "/explain", {"request": request}, timeout=10.0)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    try:
        lines = list(_lines(document))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise ServerError(
            "The account is not as this release of headrace has it; print it with --json, or use the router's release."
        ) from None
    for line in lines:  # a router may send anything, the terminal's control characters included
        print("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield _summary(document)
    for entry in document["causes"]:
        seconds = entry["seconds"]
        if seconds >= SHOWN_SECONDS:
            share = seconds / document["seconds"]
            yield f"{seconds:9.3f} s {share:6.1%}  {entry['words']}{_more(entry['cause'], document)}"
    for decision in document["decisions"]:
        yield from _decision(decision)


def _summary(document: dict[str, Any]) -> str:
    state = "failed" if document["failed"] else "complete"
    if document["running"]:
        state = "so far"
    elif document["disconnected"]:
        state = "ended by its client"
    first = document["first_token"]
    return (
        f"{document['request']}: {document['seconds']:.3f} s, {state}; first token "
        + (f"after {first:.3f} s" if first is not None else "not sent")
        + f"; {counted(document['prompt_tokens'], 'token')} of prompt, {document['cached_tokens']} of them cached; "
        + f"{counted(document['output_tokens'], 'token')} of answer"
    )


def _more(cause: str, document: dict[str, Any]) -> str:
    """What is known besides its time."""
    if cause == "queue" and document["ahead"]:
        return f" (behind {counted(document['ahead'], 'request')}, {document['ahead_tokens']} tokens of their prompts)"
    if cause == "preempted":
        return f" ({counted(document['preemptions'], 'time')})"
    return ""


def _decision(decision: dict[str, Any]) -> list[str]:
    lines = [f"placed on {decision['replica_id']}, of {counted(decision['candidates'], 'candidate')}"]
    prediction = decision["prediction"]
    if prediction is not None:
        lines[0] += (
            f": predicted {prediction['first_token']:.3f} s until the first token, {prediction['answer']:.3f} s of "
            f"answer, others delayed by {prediction['delay']:.3f} s"
        )
    if decision["source_id"]:
        how = "computes its prompt" if decision["source_computes"] else "sends cached blocks of its prompt"
        lines.append(f"  {decision['source_id']} {how}")
    return lines + [
        f"  {each['replica_id']}: {each['cost']:.3f} s, {each['cached_tokens']} of {decision['tokens']} tokens cached"
        for each in decision["considered"]
    ]
