"""/docs in a real browser: with keys it asks for one and stores it in the tab; without keys it opens at once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.router.browser import Browser

KEY, METRICS_KEY = "sk-first-key-1", "mk-metrics-key-1"
OPERATIONS = "document.querySelectorAll('#page details').length > 5"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as made:
        yield made


@pytest.fixture
def keyed(harness: Any, make_replica: Any) -> Any:
    harness.start([make_replica()], auth={"keys": [KEY], "metrics_key": METRICS_KEY})
    return harness


def _shot(browser: Browser, name: str) -> None:
    """Saves a screenshot in the folder that HEADRACE_SCREENSHOTS names, if it is set."""
    if folder := os.environ.get("HEADRACE_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png")


def _errors(harness: Any, key: str = "") -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with harness.client() as client:
        lines = client.get("/metrics", headers=headers).text.split("\n")
    return "\n".join(line for line in lines if line.startswith("headrace_request_errors_total{"))


def test_without_keys_it_opens_at_once(browser: Browser, shared: Any) -> None:
    browser.open(f"{shared.url}/docs")
    browser.until(OPERATIONS)
    assert "/v1/chat/completions" in browser.text() and "API key" not in browser.text()
    browser.click("#page details summary")
    assert "max_tokens" in browser.text()
    assert browser.console_errors() == []
    _shot(browser, "docs-open")


def test_with_keys_it_asks_for_one_and_keeps_it_in_the_tab(
    browser: Browser, keyed: Any, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    browser.open(f"{keyed.url}/docs")
    browser.until("!document.getElementById('ask').hidden")
    assert "/v1/chat/completions" not in browser.text()
    assert browser.console_errors() == [] and _errors(keyed, METRICS_KEY) == "", "no request was refused for it"
    _shot(browser, "docs-asks")
    for wrong, sentence in (("short", "8 to 512"), ("sk-wrong-key", "not valid"), (METRICS_KEY, "not valid")):
        browser.type("#key", wrong + "\ue007")  # Enter
        browser.until(f"document.getElementById('problem').textContent.includes('{sentence}')")
        assert "/v1/chat/completions" not in browser.text()
    _shot(browser, "docs-wrong-key")
    listed: list[str] = []  # the console lists each of the two 401s, some of them late

    def both_are_listed() -> bool:
        listed.extend(browser.console_errors())
        return len(listed) >= 2

    eventually(both_are_listed)
    browser.type("#key", KEY)
    browser.click("#ask button")
    browser.until(OPERATIONS)
    assert "/v1/chat/completions" in browser.text() and "needs an API key" not in browser.text()
    _shot(browser, "docs-with-key")
    browser.open(f"{keyed.url}/docs")  # again in this tab: it is not asked for again
    browser.until(OPERATIONS)
    assert KEY not in browser.url and KEY not in browser.run("return document.documentElement.outerHTML")
    assert browser.run("return document.cookie + localStorage.length") == "0", "it is stored in the session only"
    browser.click("#forget")
    browser.until("!document.getElementById('ask').hidden")
    assert browser.run("return sessionStorage.length") == 0
    assert browser.console_errors() == []


def test_a_stored_key_that_was_revoked_is_removed(browser: Browser, keyed: Any) -> None:
    browser.open(f"{keyed.url}/docs")
    browser.run("sessionStorage.setItem('headrace-api-key', 'sk-old-key-000')")
    browser.open(f"{keyed.url}/docs")
    browser.until("document.getElementById('problem').textContent.includes('not valid')")
    assert browser.run("return sessionStorage.length") == 0


def test_the_page_cannot_run_other_scripts_or_reach_other_hosts(browser: Browser, keyed: Any) -> None:
    browser.open(f"{keyed.url}/docs")
    browser.run(
        "const added = document.createElement('script'); added.textContent = 'document.title = 1';"
        "document.body.append(added)"
    )
    assert browser.run("return document.title") == "Headrace API"
    reached = browser.run("return fetch('http://127.0.0.1:9/').then(() => 'reached', () => 'blocked')")
    assert reached == "blocked"
    assert sum("Content Security Policy" in message for message in browser.console_errors()) >= 2
