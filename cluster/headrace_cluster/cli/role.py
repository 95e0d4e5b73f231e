"""`headrace role`: another role for a running replica."""

import json

from headrace_cluster.cli.client import AdminClient
from headrace_cluster.display import say

ANSWER_SECONDS = 20.0


def set_role(admin_port: int, replica: str, role: str, *, as_json: bool) -> None:
    """Raises NotRunningError; ServerError with the sentence of the refusal."""
    document = AdminClient(admin_port).call("POST", "/role", {"replica": replica, "role": role}, ANSWER_SECONDS)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    was = "as before" if document["before"] == document["role"] else f"it was {document['before']}"
    say(f"{replica}: {document['role']}, {was} ({document['seconds'] * 1e3:.0f} ms)")
