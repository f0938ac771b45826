"""`penstock thoughts`: compare conditions, and validate the thoughts of a run."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from penstock.runtime.foreground import AsJson, Trust, finish, unfolded

thought_commands = typer.Typer(
    help="Thoughts of a model: seven conditions compared, what a run has learned validated.",
    no_args_is_help=True,
)

Questions = Annotated[
    int, typer.Option("--questions", min=32, max=16_384, help="Held-out questions to measure on.")
]
"""All are answered in one pass; each needs some 100 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Options of `penstock thoughts study`."""

    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of thoughts.")]
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of all that is made.")]
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many, from 0.")] = 3
    updates: Annotated[
        int, typer.Option("--updates", min=0, help="Of each condition; 0: as in the recipe.")
    ] = 0
    questions: Questions = 1024
    only: Annotated[
        tuple[int, ...], typer.Option("--only", metavar="N", help="Some of them; may be repeated.")
    ] = ()
    vary: Annotated[
        tuple[str, ...],
        typer.Option(
            "--vary",
            metavar="KEY=VALUE",
            help="One more condition: 5 with this setting, such as algorithm.baseline=none; may be repeated.",
        ),
    ] = ()


@thought_commands.command()
@unfolded
def study(options: StudyOptions) -> None:
    """Train and measure the seven conditions; exit 1 where one that must fail is not called theatre.

    Repeated, the command continues with the missing results.
    """

    def body() -> int:
        from penstock.workloads.thoughts.study import main, make_study

        return main(make_study(options))

    _finish(
        body,
        f"interrupted: complete results are kept in {options.out}; the same command continues from there",
    )


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
        from penstock.workloads.thoughts.study import check_run

        found = check_run(run, questions=questions, deterministic=deterministic, trust=trust)
        text = json.dumps(found.json()) if as_json else "\n".join(found.words())
        sys.stdout.write(f"{text}\n")
        return EXIT_FAILED if found.verdict == "theatre" else EXIT_OK

    _finish(body, f"interrupted: nothing was measured, and {run} is as it was")


def _finish(body: Callable[[], int], interrupted: str) -> None:
    """Run a command as `finish` does. interrupted: the message after Ctrl-C."""

    def interruptible() -> int:
        try:
            return body()
        except KeyboardInterrupt:
            sys.stderr.write(f"{interrupted}\n")
            return EXIT_INTERRUPTED

    finish(interruptible)
