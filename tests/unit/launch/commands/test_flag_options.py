"""Commands whose options are the fields of a dataclass."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.runtime.foreground import unfolded


@dataclass(frozen=True, kw_only=True)
class Options:
    """An argument, a number with a bound, and options of another kind among them."""

    what: Annotated[Path | None, typer.Argument(metavar="[WHAT]", help="What.")] = None
    count: Annotated[int | None, typer.Option("--count", min=1, help="How many.")] = None
    resumption: ResumeOptions = field(default_factory=ResumeOptions)
    kept: int = 7


def taken(*said: str) -> tuple[int, list[tuple[Options, bool]]]:
    """Exit code, and what the command was called with."""
    app, calls = typer.Typer(), list[tuple[Options, bool]]()

    @app.command()
    @unfolded
    def command(options: Options, own: Annotated[bool, typer.Option("--own")] = False) -> None:
        calls.append((options, own))

    return CliRunner().invoke(app, said).exit_code, calls


def test_a_command_gets_its_options_as_one_value() -> None:
    assert taken() == (0, [(Options(), False)])
    said = taken("a", "--count", "2", "--resume", "--best", "--own")
    resumption = ResumeOptions(resume=True, best=True)
    assert said == (0, [(Options(what=Path("a"), count=2, resumption=resumption), True)])
    assert taken("--count", "0") == (2, [])


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("best", [True, False])
def test_a_child_reads_the_options_that_were_written_for_it(resume: bool, best: bool) -> None:
    options = ResumeOptions(resume=resume, allow_loss=best, best=best)
    first = options.words(over=ResumeOptions())
    assert taken(*first) == (0, [(Options(resumption=options), False)])
    again = options.after_a_crash().words(over=options)
    assert taken(*first, *again) == (0, [(Options(resumption=options.after_a_crash()), False)])
