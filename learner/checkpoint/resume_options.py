"""The options of `penstock train` and `penstock learner` that choose where a learner begins."""

from dataclasses import dataclass, replace
from typing import Annotated, Self

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """Options of a learner that resumes a run; the others need `resume`."""

    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run from its newest checkpoint.")] = (
        False
    )
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="With --resume: fall back behind what the log still holds.")
    ] = False
    best: Annotated[
        bool,
        typer.Option(
            "--best/--newest",
            help="With --resume: go back to the checkpoint of the best evaluation (learner.keep_best); what "
            "the log no longer holds is given up, so --allow-loss is needed as a rule.",
        ),
    ] = False

    def after_a_crash(self) -> Self:
        """Return the options with which the launcher restarts this learner: from its newest checkpoint."""
        return replace(self, resume=True, best=False)

    def words(self, over: Self) -> tuple[str, ...]:
        """Return the command-line options that, after those of `over`, give these options.

        Only `best` can be switched off again.
        """
        options = {
            "--resume": self.resume > over.resume,
            "--allow-loss": self.allow_loss > over.allow_loss,
            "--best": self.best > over.best,
            "--newest": self.best < over.best,
        }
        return tuple(word for word, is_needed in options.items() if is_needed)
