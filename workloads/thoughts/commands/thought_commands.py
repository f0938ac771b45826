"""`penstock thoughts`: conditions compared, and thoughts of a run validated."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.command_exit import finish
from penstock.runtime.command_options import AsJson, Trust
from penstock.runtime.exit import EXIT_INTERRUPTED

thought_commands = typer.Typer(
    help="Thoughts of a model: seven conditions compared, what a run has learned validated.",
    no_args_is_help=True,
)

Questions = Annotated[
    int, typer.Option("--questions", min=32, max=16_384, help="Held-out questions to measure on.")
]
"""All are answered in one pass, and each takes some 100 KB."""

_KEPT = "interrupted: what is whole is kept in {out}; the same command goes on from there"
_NOTHING = "interrupted: nothing was measured, and {run} is as it was"


@thought_commands.command()
def conditions(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of thoughts.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all that is made.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many, from 0.")] = 3,
    updates: Annotated[
        int, typer.Option("--updates", min=0, help="Of each condition; 0: as the recipe says.")
    ] = 0,
    questions: Questions = 1024,
    only: Annotated[
        list[int] | None, typer.Option("--only", metavar="N", help="Some of them; may be repeated.")
    ] = None,
    all_gates: Annotated[
        bool, typer.Option("--all-gates", help="Fail where any gate does not hold, not verdicts alone.")
    ] = False,
) -> None:
    """Train and measure the seven conditions; exit 1 where one that must fail is not called theatre.

    The other gates are shown, with bounds for six hops on eleven symbols. Called again, it goes on with what
    is missing.
    """

    def body() -> int:
        from workloads.thoughts.commands.conditions_command import Asked, main

        asked = Asked(
            recipe=recipe,
            out=out,
            seeds=seeds,
            updates=updates,
            questions=questions,
            only=tuple(only or ()),
            all_gates=all_gates,
        )
        return main(asked)

    _finish(body, _KEPT.format(out=out))


@thought_commands.command()
def vary(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of thoughts.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="A setting, such as algorithm.baseline.")],
    values: Annotated[list[str], typer.Argument(metavar="VALUE…", help="Each gets a run for every seed.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all that is made.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many, from 0.")] = 1,
    updates: Annotated[int, typer.Option("--updates", min=0, help="Of each; 0: as the recipe says.")] = 0,
) -> None:
    """Vary one setting, with everything else the same: a table, and gains over updates as a picture."""

    def body() -> int:
        from workloads.thoughts.commands.vary_command import Variation, main

        varied = Variation(
            recipe=recipe, key=key, values=tuple(values), out=out, seeds=seeds, updates=updates
        )
        return main(varied)

    _finish(body, _KEPT.format(out=out))


@thought_commands.command()
def variance(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of thoughts that has ended.")],
    draws: Annotated[
        int, typer.Option("--draws", min=2, help="Batches of thoughts on the same questions.")
    ] = 24,
    at_start: Annotated[
        bool, typer.Option("--start", help="Of the model that the run began with, not of its last.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Measure the variance of the policy gradient with each baseline, on a fixed batch of questions."""

    def body() -> int:
        from workloads.thoughts.commands.gradient_variance import main

        return main(run, draws=draws, at_start=at_start, trust=trust)

    _finish(body, _NOTHING.format(run=run))


@thought_commands.command()
def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of thoughts that has ended.")],
    questions: Questions = 1024,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Validate the likeliest thoughts, not drawn ones.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Say whether the answers of a run come from its thoughts; exit 1 for theatre."""

    def body() -> int:
        from workloads.thoughts.commands.thought_check import main

        return main(run, questions=questions, deterministic=deterministic, trust=trust, as_json=as_json)

    _finish(body, _NOTHING.format(run=run))


def _finish(body: Callable[[], int], interrupted: str) -> None:
    """Run a command as `finish`. interrupted: what is said where Ctrl-C ends it."""

    def interruptible() -> int:
        try:
            return body()
        except KeyboardInterrupt:
            sys.stderr.write(f"{interrupted}\n")
            return EXIT_INTERRUPTED

    finish(interruptible)
