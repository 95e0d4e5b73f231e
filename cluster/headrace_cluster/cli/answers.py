"""What client commands make of a server's answers."""

import http.client
import json

from headrace_cluster.errors import NotRunningError
from headrace_cluster.local.state import ServeState, describe


def starting_error(server: ServeState) -> NotRunningError:
    """For a server that does not listen yet."""
    return NotRunningError(f"{describe(server)} is starting and cannot answer yet; try again in a moment")


def error_sentence(response: http.client.HTTPResponse) -> str:
    """Of an answer that is an error."""
    try:
        return str(json.load(response)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"the server answered with status {response.status}; is this the right port?"
