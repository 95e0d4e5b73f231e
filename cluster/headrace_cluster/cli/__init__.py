"""The command line. Heavy libraries are imported in the commands that need them: client commands start quickly."""

import os
import sys


def main() -> None:
    """Runs one command. Exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    from headrace_cluster.errors import ServerChoiceError, SpecError
    from headrace_cluster.launch.display import show_message
    from headrace_proto.errors import HeadraceError

    status = 0
    try:
        status = _run(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except (SpecError, ServerChoiceError) as error:
        show_message(str(error), "error")
        status = 2
    except HeadraceError as error:
        show_message(str(error), "error")
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """The exit status of the command. Raises SpecError for wrong usage, and the errors of the command."""
    import typer

    from headrace_cluster.cli.app import app
    from headrace_cluster.cli.foreign_flags import check_flags
    from headrace_cluster.cli.usage import UsageError, usage_sentence
    from headrace_cluster.errors import SpecError

    check_flags(arguments)
    try:
        status = app(args=arguments, prog_name="headrace", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error, file=sys.stderr)
            return 2
        raise SpecError(usage_sentence(error)) from error
    except typer.Abort:
        return 1
    return status if isinstance(status, int) else 0
