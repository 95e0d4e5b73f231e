"""`headrace explain`: the controller collects an account from the routers' reports."""

import asyncio
import json

import pytest

from headrace_cluster.controller import explaining
from headrace_cluster.controller.explaining import Explaining
from headrace_cluster.errors import ExplainRefusedError, UnknownRequestError
from headrace_proto.control_pb2 import RequestAccount


async def _answer(table: Explaining, router: str, document: str) -> list[str]:
    """What a router does: it is asked with the reply to one report, and answers with the next."""
    names = table.requested(router)
    table.receive(router, [RequestAccount(request_id=name, document=document) for name in names])
    return names


def test_one_router_has_the_account() -> None:
    async def scenario() -> None:
        table = Explaining(lambda: ["r1", "r2"])
        asked = asyncio.create_task(table.explain("id-1"))
        await asyncio.sleep(0)
        assert await _answer(table, "r1", "") == ["id-1"]
        assert table.requested("r1") == [], "it has answered"
        assert table.requested("r2") == table.requested("r2") == ["id-1"], "a reply, or a report, may be lost"
        assert await _answer(table, "r3", '{"seconds": 9}') == [], "it is not registered"
        table.receive("r3", [RequestAccount(request_id="id-1", document='{"seconds": 9}')])
        assert not asked.done()
        await _answer(table, "r2", json.dumps({"seconds": 1.5}))
        assert await asked == {"seconds": 1.5, "router": "r2"}
        assert table.requested("r2") == []

    asyncio.run(scenario())


def test_no_account_is_an_error_that_counts_silent_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(explaining, "ANSWER_SECONDS", 0.05)
        with pytest.raises(ExplainRefusedError, match="no router is connected"):
            await Explaining(list).explain("id-1")
        table = Explaining(lambda: ["r1", "r2"])
        with pytest.raises(UnknownRequestError, match="2 of 2 did not answer"):
            await table.explain("id-1")
        assert table.requested("r1") == [], "the question has ended"

    asyncio.run(scenario())
