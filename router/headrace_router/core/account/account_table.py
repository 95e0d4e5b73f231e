"""The accounts of the newest requests."""

from headrace_router.core.account.time_account import TimeAccount

KEPT = 4000  # requests; an account has about 2.4 KiB, 4.1 KiB at most


class AccountTable:
    """By request id, and by the id of the answer; of several requests with one id the newest."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._ids: dict[TimeAccount, tuple[str, str]] = {}  # the oldest first
        self._by_id: dict[str, list[TimeAccount]] = {}  # clients choose request ids: several may have the same

    def open(self, request_id: str, answer_id: str, now: float) -> TimeAccount:
        """A new account, kept until so many newer ones have been opened."""
        account = TimeAccount(request_id, now)
        self._ids[account] = request_id, answer_id
        for name in (request_id, answer_id):
            self._by_id.setdefault(name, []).append(account)
        if len(self._ids) > self._kept:
            self.discard(next(iter(self._ids)))
        return account

    def discard(self, account: TimeAccount) -> None:
        """Of a request that was refused before it was placed: refusals do not displace the accounts of others."""
        for name in self._ids.pop(account, ()):
            self._by_id[name].remove(account)
            if not self._by_id[name]:
                del self._by_id[name]

    def get(self, name: str) -> TimeAccount | None:
        """name: a request's id, or that of its answer, which may begin with "chatcmpl-" or "cmpl-"."""
        named = self._by_id.get(name) or self._by_id.get(name.rpartition("cmpl-")[2])
        return named[-1] if named else None

    def __len__(self) -> int:
        return len(self._ids)
