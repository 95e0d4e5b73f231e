"""`headrace role`: another role for a running replica."""

import json

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.launch.display import show_message

ANSWER_SECONDS = 20.0


def set_role(choice: ServerChoice, replica: str, role: str, *, as_json: bool) -> None:
    """Raises NotRunningError; ServerError with the sentence of the server."""
    document = AdminClient(choice).call("POST", "/role", {"replica": replica, "role": role}, ANSWER_SECONDS)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    was = "as before" if document["before"] == document["role"] else f"it was {document['before']}"
    show_message(f"{replica}: {document['role']}, {was} ({document['seconds'] * 1e3:.0f} ms)")
