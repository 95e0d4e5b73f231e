"""The page at /docs: its script fetches /openapi.json, with an API key where one is needed, and renders it.

The page contains nothing that needs a key and loads nothing from other origins. The tab's session storage has the key.
"""

import base64
import hashlib
from importlib.resources import files
from string import Template


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_PAGE, _STYLE, _SCRIPT = Template(_file("docs_page.html")), _file("docs_page.css"), _file("docs_page.js")

DOCS_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def docs_page(*, needs_key: bool) -> str:
    """The whole page. needs_key: whether the API needs a key, so that the page asks for it before the first request."""
    return _PAGE.substitute(style=_STYLE, script=_SCRIPT, key="needed" if needs_key else "none")
