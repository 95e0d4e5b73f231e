"""Registered routers that reach no replica while others do: changes do not wait for them without end. Pure."""

from collections.abc import Collection

from headrace_cluster.core.router_reports import RouterReports

START_SECONDS = 5.0  # for a router that has just registered to connect and to report
WAIT_SECONDS = 40.0  # that changes wait for such a router; as long as one that was lost counts


class RouterReach:
    """Since when each registered router receives from no replica. Times are seconds of the caller's clock.

    While no router receives from any replica, all count: the controller cannot judge which of them are cut off.
    """

    def __init__(self, router_reports: RouterReports) -> None:
        self._router_reports = router_reports
        self._since: dict[str, float] = {}

    def look(self, registered: Collection[str], now: float) -> None:
        """Compares the registered routers; to be called several times a minute."""
        receiving = self._router_reports.receiving(now)
        if not receiving:
            self._since = {}  # or one whose next report comes last would count as unreached all that time
            return
        self._since = {router: self._since.get(router, now) for router in registered if router not in receiving}

    def unreached(self, now: float) -> dict[str, float]:
        """Seconds for which each router has received from no replica; empty while no router does."""
        if not self._router_reports.receiving(now):
            return {}
        return {router: now - at for router, at in self._since.items()}
