"""The commands about Headrace itself."""

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def test(context: typer.Context) -> None:
    """Check style, types and behaviour of this checkout; --slow for the long tests; more goes to pytest."""
    from headrace_cluster.cli.test import run_tests

    raise typer.Exit(run_tests(list(context.args)))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))
