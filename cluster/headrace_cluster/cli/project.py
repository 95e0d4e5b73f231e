"""The commands about Headrace itself."""

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command(
    # Without -h, which would be found within a short option of pytest's such as -rfh.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[--faults [AREA] | --measure] [--newest] [-h | --help]",
)
def test(context: typer.Context) -> None:
    """Check style, types and behaviour of this checkout.

    Without arguments it runs ruff, mypy and the tests that CI runs. --faults runs those with real servers, ranks and
    kills, of one area or of all, and a failed one once more; --measure those that measure time. --newest makes an
    environment with the newest versions of all dependencies, beside the usual one, and runs the tests there. Further
    arguments go to pytest, and then pytest alone runs: headrace test tests/router -k chat. For pytest's own help:
    headrace test -- --help
    """
    from headrace_cluster.cli.test import run_tests

    if "-h" in context.args:
        print(context.get_help())
        return
    raise typer.Exit(run_tests([argument for argument in context.args if argument != "--newest"]))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))
