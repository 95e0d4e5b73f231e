"""The commands about Headrace itself."""

from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command(
    # Without -h, which would be found within a short option of pytest's such as -rfh.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[--ci | --slow] [-h | --help]",
)
def test(
    context: typer.Context,
    ci: Annotated[bool, typer.Option("--ci", help="Also the tests marked ci, as continuous integration does.")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Run the tests marked slow, and nothing else.")] = False,
) -> None:
    """Check style, types and behaviour of this checkout.

    Without arguments it runs ruff, mypy and the fast tests; --ci adds those that start and kill whole servers, --slow
    runs the long ones alone. Further arguments go to pytest, and then pytest alone runs: headrace test tests/router
    -k chat. For pytest's own help: headrace test -- --help
    """
    from headrace_cluster.cli.test import run_tests

    if "-h" in context.args:
        print(context.get_help())
        return
    raise typer.Exit(run_tests(list(context.args), ci=ci, slow=slow))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))
