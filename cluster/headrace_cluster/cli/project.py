"""The commands about Headrace itself: `version`, and `test`: all checks for a change."""

import subprocess
import sys
from pathlib import Path

import typer

from headrace_cluster.errors import SpecError

app = typer.Typer(rich_markup_mode=None)

CHECKS = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--no-cache", "--check", "."),
    ("mypy",),
    ("pytest", "-n", "2", "--dist", "loadfile"),
)


@app.command(
    # Without -h, which would be found within a short option of pytest's such as -rfh.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[--faults [AREA] | --measure] [--newest] [-h | --help]",
)
def test(context: typer.Context) -> None:
    """Check style, types and behaviour of this checkout.

    Without arguments it runs ruff, mypy and the tests that CI runs. --faults runs those with real servers, ranks and
    kills, of one area or of all; --measure those that measure time. --newest makes an environment with the newest
    versions of all dependencies, beside the usual one, and runs the tests there. Further arguments go to pytest, and
    then pytest alone runs: headrace test tests/router -k chat. For pytest's own help: headrace test -- --help
    """
    if "-h" in context.args:
        print(context.get_help())
        return
    rest = [argument for argument in context.args if argument != "--newest"]
    if "--faults" in rest[:-1] and not (area := rest[rest.index("--faults") + 1]).startswith("-"):
        at = rest.index("--faults")  # as one argument: pytest would take an area for the folder of that name
        rest = [*rest[:at], f"--faults={area}", *rest[at + 2 :]]
    failed = [command for command in ([("pytest", *rest)] if rest else CHECKS) if not _passes(command)]
    for command in failed:
        print(f"FAILED: {' '.join(command)}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))


def _passes(command: tuple[str, ...]) -> bool:
    print(f"== {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=_checkout(), check=False).returncode == 0


def _checkout() -> Path:
    """The checkout that this package is installed from. Raises SpecError."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "pyproject.toml").is_file() and (folder / "tests").is_dir():
            return folder
    raise SpecError("`headrace test` works in a checkout of the project; clone it and run ./headrace test there")
