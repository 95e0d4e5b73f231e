"""A program: `headrace controller` in a Ray of others, with replicas without an engine. Argument: the spec as JSON."""

import json
import sys

from headrace_base.errors import HeadraceError
from headrace_cluster.launch.controller_run import run_controller
from headrace_cluster.launch.display import show_message
from headrace_cluster.spec.cluster_spec import parse_spec

if __name__ == "__main__":
    try:
        run_controller(parse_spec(json.loads(sys.argv[1])), replica_class="support.cluster.fake_replica:FakeReplica")
    except HeadraceError as error:
        show_message(str(error), "error")
        sys.exit(1)
