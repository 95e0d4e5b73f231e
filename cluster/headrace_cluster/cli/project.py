"""The commands about Headrace itself: `version`, and `test`: all checks for a change, and a short summary."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from headrace_cluster.errors import SpecError

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
    if "-h" in context.args:
        print(context.get_help())
        return
    raise typer.Exit(run_tests([argument for argument in context.args if argument != "--newest"]))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))


PYTHON = [sys.executable, "-m"]
PYTEST = [*PYTHON, "pytest"]
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")  # in the checkout


@dataclass(frozen=True, slots=True)
class Step:
    """One command. The output of a quiet one is shown when it has ended."""

    name: str
    command: list[str]
    quiet: bool = False


CHECKS = [
    Step("ruff check", [*PYTHON, "ruff", "check", "--no-cache", "."], quiet=True),
    Step("ruff format", [*PYTHON, "ruff", "format", "--no-cache", "--check", "."], quiet=True),
    Step("mypy", [*PYTHON, "mypy"], quiet=True),
    Step("pytest", [*PYTEST, "-n", "2", "--dist", "loadfile"]),
]


def checkout() -> Path:
    """The checkout that this package is installed from. Raises SpecError."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "pyproject.toml").is_file() and (folder / "tests").is_dir():
            return folder
    raise SpecError("`headrace test` works in a checkout of the project; clone it and run ./headrace test there")


def run_tests(rest: list[str]) -> int:
    """Runs the steps and prints a summary; 0 if all passed. With `rest`, pytest's arguments, pytest alone runs."""
    rest = [_from_checkout(argument) for argument in _joined(rest)]
    if any(argument.partition("=")[0] == "--faults" for argument in rest):
        return _run_faults(rest)
    results = _run([Step("pytest", [*PYTEST, *rest])] if rest else CHECKS)
    _print_summary(results)
    return 0 if all(code == 0 for _, code, _ in results) else 1


def _joined(rest: list[str]) -> list[str]:
    """`--faults AREA` as one argument: pytest would take an area like `router` for the folder of that name."""
    if "--faults" in rest[:-1] and not rest[rest.index("--faults") + 1].startswith("-"):
        at = rest.index("--faults")
        rest = [*rest[:at], f"--faults={rest[at + 1]}", *rest[at + 2 :]]
    return rest


def _from_checkout(argument: str) -> str:
    """A path that exists where the user stands and not in the checkout, as an absolute one."""
    path, separator, test = argument.partition("::")
    if argument.startswith("-") or (checkout() / path).exists() or not Path(path).exists():
        return argument
    return f"{Path(path).resolve()}{separator}{test}"


def _run_faults(rest: list[str]) -> int:
    """Runs a failed test once more: one that passes then is reported as flaky."""
    results = _run([Step("pytest", [*PYTEST, *rest])])
    flaky: list[str] = []
    if results[0][1] == 1 and (failed := _last_failed()):
        results += _run([Step("pytest, second try", [*PYTEST, *rest, "--last-failed"])])
        flaky = sorted(failed - _last_failed())
    _print_summary(results)
    for test in flaky:
        print(f"flaky: {test}")
    return 0 if results[-1][1] == 0 else 1


def _last_failed() -> set[str]:
    path = checkout() / LAST_FAILED
    return set(json.loads(path.read_text())) if path.is_file() else set()


def _print_summary(results: list[tuple[Step, int, float]]) -> None:
    print("== summary")
    for step, code, seconds in results:
        print(f"{'passed' if code == 0 else 'FAILED':8}{step.name:24}{seconds:7.1f} s")


def _run(steps: list[Step]) -> list[tuple[Step, int, float]]:
    """Side by side."""
    started = []
    for step in steps:
        print(f"== {step.name}", flush=True)
        stdout, stderr = (subprocess.PIPE, subprocess.STDOUT) if step.quiet else (None, None)
        process = subprocess.Popen(step.command, cwd=checkout(), stdout=stdout, stderr=stderr)
        started.append((step, process, time.monotonic()))
    results = []
    for step, process, began in started:
        output, _ = process.communicate()
        if output and process.returncode != 0:
            print(f"== {step.name}\n{output.decode(errors='replace')}", flush=True)
        results.append((step, process.returncode, time.monotonic() - began))
    return results
