"""The command line. Modules of heavy libraries are imported where a command needs them: client commands stay quick."""

import os
import sys


def main() -> None:
    """Runs one command. Exit status: 0 done, 1 failed, 2 wrong usage."""
    from headrace_cluster.cli.app import app
    from headrace_cluster.errors import SpecError
    from headrace_proto.errors import HeadraceError

    status = 0
    try:
        app(prog_name="headrace")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except SpecError as error:
        print(f"headrace: {error}", file=sys.stderr)
        status = 2
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 1
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)
