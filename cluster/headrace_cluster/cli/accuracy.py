"""`headrace check-accuracy`: how close a model is, as it is served on this machine, to plain transformers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cluster.cli import options as o
from headrace_cluster.errors import SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.spec.settings import build_spec

if TYPE_CHECKING:  # the command line is read without torch
    from headrace_worker.accuracy import Report

DENSE = "dense"

app = typer.Typer(rich_markup_mode=None)


@app.command("check-accuracy")
@o.takes_settings("models")
def check_accuracy(
    given: dict[str, Any],
    config: o.Config = None,
    reference: Annotated[
        str,
        typer.Option(
            "--reference",
            metavar="dense|SOURCE",
            help="dense: the same files, dequantized, computed by plain transformers. SOURCE: another checkpoint, such "
            "as the original of a quantized one.",
        ),
    ] = DENSE,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Instead of Python's manual.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Of the text, from its beginning.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compare a model's next-token probabilities with a reference. Status 1 when they differ more than they may."""
    spec = build_spec(given, config)
    if len(spec.models) != 1 or spec.models[0].tp * spec.models[0].pp != 1:
        raise SpecError("check-accuracy takes one model on one rank: leave out --tp, --pp and other models")
    written = _read(text) if text is not None else _manual()
    from headrace_cluster.core.rank_config import replica_config
    from headrace_worker.accuracy import check

    replica = replica_config(spec.models[0], replica_id="accuracy")
    found = check(replica, written, tokens, None if reference == DENSE else reference, _Stages())
    if as_json:
        print(json.dumps(asdict(found) | {"is_right": found.is_right}, indent=2))
    else:
        _print(spec.models[0].source, found, reference)
    raise typer.Exit(not found.is_right)


def _print(source: str, found: "Report", reference: str) -> None:
    rows = [("its own files, dequantized", found.dense)]
    if found.original is not None:
        rows.append((reference, found.original))
    print(f"{source}, served on {found.execution}, {found.dense.positions:,} positions")
    print(f"{'against':<40} {'KL mean':>10} {'KL p99':>10} {'same first':>10} {'log-likelihood':>14}")
    for name, each in rows:
        print(
            f"{name[-40:]:<40} {each.divergence:>10.2g} {each.divergence_p99:>10.2g} {each.same:>10.2%} "
            f"{each.likelihood:>+14.2g}"
        )
    if not found.dense.is_within(found.bound):
        print(
            f"Wrong: a mean KL of {found.bound.divergence:g} and {found.bound.same:.1%} of the first choices are the "
            "bounds of this execution. Please report it with the name of the model."
        )
    for name, difference in found.apart:
        print(
            f"Wrong: {name} differs from the original's by {difference:.0%} of its size: the checkpoint is damaged, or "
            "was made from another one."
        )


class _Stages:
    """Shows a line for each stage."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, stage: str, _fraction: float) -> None:
        if stage != self._last:
            self._last = stage
            show_message(stage)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--text {path} cannot be read as UTF-8: {error}") from error


def _manual() -> str:
    """English prose that every Python has."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
