"""What routers are informed of between two steps."""

from dataclasses import replace

from headrace_worker.core.engine import LoadSnapshot
from headrace_worker.core.latency import StepCost
from headrace_worker.core.load_reports import LoadReports
from headrace_worker.core.scheduler_counters import SchedulerCounters
from headrace_worker.core.transfer.fetch import FetchCounters

LOAD = LoadSnapshot(1, 0, 0.5, 8, 0, 0.01, StepCost(), SchedulerCounters(), FetchCounters(), 0, [])


def test_a_router_is_informed_of_what_others_have_sent() -> None:
    reports = LoadReports(0.25)
    first = reports.connect(1.0)
    reports.received(first, 10)
    assert not reports.begin_announcement(), "there is no other router"
    second, third = reports.connect(1.0), reports.connect(1.0)
    reports.received(second, 20)
    assert reports.begin_announcement() and not reports.begin_announcement(), "one for all that comes until then"
    reports.disconnect(third)
    assert reports.announcement() == [first, second] and (first.others, second.others) == (1, 1)
    assert reports.begin_announcement() and reports.announcement() == [], "both know it"
    assert (len(reports.arrivals), reports.arrivals.tokens) == (2, 30)
    reports.accepted(1)
    assert (len(reports.arrivals), reports.arrivals.tokens) == (1, 20)


def test_a_refused_submit_is_counted_for_its_router_alone() -> None:
    reports = LoadReports(0.25)
    first, second = reports.connect(1.0), reports.connect(1.0)
    reports.received(first, None)
    assert (first.submits, second.submits, len(reports.arrivals)) == (1, 0, 0)
    assert reports.announcement() == []


def test_a_report_is_due_when_a_router_was_informed() -> None:
    reports = LoadReports(0.25)
    first, second = reports.connect(1.0), reports.connect(1.0)
    second.pacer.sent(reports.state(second, LOAD, draining=False), 0.0)
    reports.received(first, 5)
    assert not second.pacer.due(reports.state(second, LOAD, draining=False), 0.001)
    reports.announcement()
    assert second.pacer.due(reports.state(second, LOAD, draining=False), 0.001)
    idle = reports.state(second, replace(LOAD, running=0), draining=True)
    assert idle.next_step == 0.25 and idle.draining
