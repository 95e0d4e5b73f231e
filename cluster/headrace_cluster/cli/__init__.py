"""The command line. Heavy libraries are imported in the commands that need them: client commands start quickly."""

import sys


def main() -> None:
    """Runs one command. Exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    from headrace_base.errors import HeadraceError
    from headrace_cluster.cli.app import app
    from headrace_cluster.cli.foreign_flags import check_flags
    from headrace_cluster.errors import ServerChoiceError, SpecError
    from headrace_cluster.launch.display import show_message

    try:
        check_flags(sys.argv[1:])
        app(prog_name="headrace")
    except HeadraceError as error:
        show_message(str(error), "error")
        sys.exit(2 if isinstance(error, SpecError | ServerChoiceError) else 1)
