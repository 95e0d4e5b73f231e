"""Accounts of requests, which routers keep: an operator's question waits here until their next reports."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace_cluster.errors import ExplainRefusedError, UnknownRequestError
from headrace_proto import control_pb2 as pb
from headrace_router.core.account import KEPT

ANSWER_SECONDS = 3.0  # for all routers: they report twice a second
MAX_QUESTIONS = 16  # at a time


@dataclass(eq=False)
class _Question:
    request_id: str
    waiting: set[str]  # routers that have not answered
    document: dict[str, Any] | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class Explaining:
    """For one event loop."""

    def __init__(self, routers: Callable[[], Collection[str]]) -> None:
        """routers: ids of those that are registered."""
        self._routers = routers
        self._questions: list[_Question] = []

    async def explain(self, request_id: str) -> dict[str, Any]:
        """The first account of a request that a router sends. Raises UnknownRequestError, ExplainRefusedError."""
        routers = set(self._routers())
        if not routers:
            raise ExplainRefusedError("no router is connected to this controller; try again once one is")
        if len(self._questions) >= MAX_QUESTIONS:
            raise ExplainRefusedError("others ask for accounts at the moment; try again")
        question = _Question(request_id, routers)
        self._questions.append(question)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await question.answered.wait()
        except TimeoutError:
            pass
        finally:
            self._questions.remove(question)
        if question.document is not None:
            return question.document
        silent = f"; {len(question.waiting)} of {len(routers)} did not answer" if question.waiting else ""
        raise UnknownRequestError(
            f"no router has an account of '{request_id}': each keeps its last {KEPT:,} requests until it restarts, "
            f"without refused ones; pass the x-request-id of a response, or its id{silent}"
        )

    def requested(self, router_id: str) -> list[str]:
        """What a router is asked for with the reply to its report, until it answers: messages may be lost."""
        return [each.request_id for each in self._questions if router_id in each.waiting]

    def receive(self, router_id: str, accounts: Iterable[pb.RequestAccount]) -> None:
        """The accounts in a router's report."""
        for account in accounts:
            found = [each for each in self._questions if each.request_id == account.request_id]
            asked = [question for question in found if router_id in question.waiting]
            document = json.loads(account.document) if asked and account.document else None
            for question in asked:
                question.waiting.discard(router_id)
                if document is not None:
                    question.document = document | {"router": router_id}
                if question.document is not None or not question.waiting:
                    question.answered.set()
