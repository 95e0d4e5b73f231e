"""A registered router that reaches no replica: changes of replicas wait for it, but not without end."""

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.router_reports import RouterReach, RouterReports

NAMES = [ReplicaName("smollm2-0", 1), ReplicaName("smollm2-1", 1)]


def _heard(*, heard: bool) -> dict[ReplicaName, bool]:
    return dict.fromkeys(NAMES, heard)


def test_seconds_count_from_the_first_message_that_only_others_receive() -> None:
    reports = RouterReports()
    reach = RouterReach(reports)
    seconds: list[dict[str, float]] = []
    for now, first, second in ((0.0, False, False), (1.0, True, False), (3.0, True, True), (4.0, True, False)):
        reports.report("first", _heard(heard=first), now)
        reports.report("second", _heard(heard=second), now)
        reach.look({"first", "second"}, now)
        seconds.append(reach.unreached(now + 1.0))
    assert seconds == [{}, {"second": 1.0}, {}, {"second": 1.0}]
    reach.look({"first"}, 5.0)
    assert reach.unreached(5.0) == {}, "its stream has ended"


def test_a_router_that_does_not_report_is_not_reached() -> None:
    """It has stopped, or it is of a contract version that replicas refuse."""
    reports = RouterReports()
    reach = RouterReach(reports)
    for second in range(60):
        reports.report("first", _heard(heard=True), float(second))
        reach.look({"first", "silent"}, float(second))
    assert reach.unreached(59.0) == {"silent": 59.0}
