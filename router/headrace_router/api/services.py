"""The services that the HTTP and the gRPC API of a router share."""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from headrace_router.access.auth import Authenticator
from headrace_router.api.http.body import BodyReader
from headrace_router.config import RouterConfig
from headrace_router.core.account import AccountTable, TimeAccount
from headrace_router.core.cache_miss import Visits
from headrace_router.core.errors import InvalidRequestError
from headrace_router.core.fleet import Fleet
from headrace_router.core.placement import FleetPlacement
from headrace_router.dispatch.admission import Admission
from headrace_router.dispatch.prepare import GenerationRequest, Preparer
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.dispatch.running_request import RunningRequest, Turns
from headrace_router.text.model_card import ModelCard
from headrace_router.text.tokenizer_pool import TokenizerPool

SLICE_SECONDS = 0.002  # formatting time for one answer before other answers go on
BLOCK_BYTES = 64 << 10  # bytes of an answer that are written at a time


class WorkSlices:
    """Sends what generators produce: one slice per turn of the event loop, whatever the number of answers."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def send(self, pieces: Iterator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends pieces as they are made, in blocks of about 64 KiB. `send` waits while the client does not read."""
        block, complete = take(pieces)
        await send(block)
        while not complete:
            block, complete = await self.next(pieces)
            await send(block)

    async def next(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """One more slice of work: see `take`."""
        async with self._turn:  # first come, first served
            taken = take(pieces)
            await asyncio.sleep(0)
            return taken


def take(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """What can be made in a slice, and whether it was the last."""
    block: list[bytes] = []
    size, end = 0, time.perf_counter() + SLICE_SECONDS
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES or time.perf_counter() >= end:
            return b"".join(block), False
    return b"".join(block), True


_VALID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id(given: bytes) -> str:
    """given: what the client sent; empty or invalid = it gets a random one."""
    return given.decode() if _VALID.fullmatch(given) else secrets.token_hex(16)


def session_of(metadata: Iterable[tuple[bytes | str, bytes | str]] | None, config: RouterConfig) -> str:
    """The first value of the header `config.session_header`, which may be written with underscores; empty = none.

    Raises InvalidRequestError if it has more than `limits.label_bytes` bytes, as for labels in a body.
    """
    name, limit = config.session_header, config.limits.label_bytes
    for given, value in metadata or ():
        key = given.decode("latin-1") if isinstance(given, bytes) else given
        if value and (key == name or key.replace("_", "-") == name.replace("_", "-")):
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if len(text) > limit:
                raise InvalidRequestError(f"'{name}' has {len(text)} bytes; the limit is {limit}.", param=name)
            return text
    return ""


@dataclass(frozen=True, slots=True)
class Services:
    """One of each per router; made by `RouterServer`."""

    config: RouterConfig
    auth: Authenticator
    fleet: Fleet[ModelCard]
    placement: FleetPlacement[ModelCard]
    metrics: RouterMetrics
    admission: Admission
    pool: TokenizerPool
    preparer: Preparer
    bodies: BodyReader
    slices: WorkSlices
    turns: Turns
    accounts: AccountTable
    visits: Visits

    @property
    def accepting(self) -> bool:
        """Whether requests get an answer here, if only that no replica is ready: the models are known."""
        return not self.admission.ending and (self.fleet.joined or self.config.controller is None)

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted and can be answered."""
        return not self.admission.ending and self.fleet.ready

    @contextmanager
    def account(self, request_id: str, answer_id: str, began: float) -> Iterator[TimeAccount]:
        """The account of a request, until the client has its answer; one that was refused has none.

        began: on the clock of time.monotonic.
        """
        account, failed, disconnected = self.accounts.open(request_id, answer_id, began), True, False
        try:
            yield account
            failed = False
        except (asyncio.CancelledError, GeneratorExit):
            failed, disconnected = False, True
            raise
        finally:
            account.finish(time.monotonic(), failed=failed, disconnected=disconnected)
            if (failed or disconnected) and not account.prompt_tokens:
                self.accounts.discard(account)  # it was refused

    @asynccontextmanager
    async def run_request(self, request: GenerationRequest, account: TimeAccount) -> AsyncIterator[RunningRequest]:
        """Runs a request that was admitted; a shutdown ends it. Raises ShuttingDownError."""
        given = self.placement, self.metrics, self.config, self.turns, account, self.visits
        async with RunningRequest(request, *given) as running:
            with self.admission.failed_on_shutdown(running.fail):
                yield running
