"""A program: `headrace serve` without its router, over replicas that run no engine. Arguments: the spec as JSON."""

import json
import sys

from headrace_cluster.serve import Serve
from headrace_cluster.spec import parse_spec
from headrace_proto.errors import HeadraceError

if __name__ == "__main__":
    try:
        serve = Serve(parse_spec(json.loads(sys.argv[1])), with_router=False, replica_class="fake_replica:FakeReplica")
        sys.exit(serve.run())
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)
