"""A program: `headrace serve` without its router, with replicas without an engine. Argument: the spec as JSON."""

import json
import sys

from headrace_cluster.launch.display import show_message
from headrace_cluster.launch.serve import Serve
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto.errors import HeadraceError

if __name__ == "__main__":
    try:
        spec = parse_spec(json.loads(sys.argv[1]))
        serve = Serve(spec, with_router=False, replica_class="support.cluster.fake_replica:FakeReplica")
        sys.exit(serve.run())
    except HeadraceError as error:
        show_message(str(error), "error")
        sys.exit(1)
