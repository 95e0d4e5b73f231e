"""A program: `headrace serve` without its router, or `headrace controller` for a spec with an address of Ray.

The replicas have no engine. Argument: the spec as JSON.
"""

import json
import sys

from headrace_cluster.launch.display import show_message
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto.errors import HeadraceError

REPLICA = "support.cluster.fake_replica:FakeReplica"

if __name__ == "__main__":
    try:
        spec = parse_spec(json.loads(sys.argv[1]))
        if spec.ray.address is not None:
            from headrace_cluster.launch.controller import run_controller

            run_controller(spec, replica_class=REPLICA)
        from headrace_cluster.launch.serve import Serve

        sys.exit(Serve(spec, with_router=False, replica_class=REPLICA).run())
    except HeadraceError as error:
        show_message(str(error), "error")
        sys.exit(1)
