"""Where the time of a request went."""

from headrace_router.core.account.account_table import AccountTable
from headrace_router.core.account.cause import Cause
from headrace_router.core.account.time_account import TimeAccount

__all__ = ["AccountTable", "Cause", "TimeAccount"]
