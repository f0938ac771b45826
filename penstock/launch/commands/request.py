"""The options of `penstock train`, `evaluate` and `certificates` as dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.protocol.limits import MAX_NUMBER
from penstock.runtime.foreground import RepeatedAssignments, Trust, finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of a run to train; None: not given."""

    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[ENV_OR_CONFIG]", help="Gymnasium id, .toml file, or with --resume a run's folder."
        ),
    ] = None
    actors: Annotated[
        int | None, typer.Option("--actors", min=0, help="Rollout workers; 0: only clients of --serve act.")
    ] = None
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Learner processes that share each update.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the run.")] = None
    target_return: Annotated[
        float | None, typer.Option("--target-return", help="Mean return that counts as solved.")
    ] = None
    total_steps: Annotated[
        int | None, typer.Option("--total-steps", min=1, help="Environment steps at most.")
    ] = None
    episodes: Annotated[
        int | None,
        typer.Option(
            "--episodes",
            min=1,
            help="End once so many training episodes have ended; those under way count on.",
        ),
    ] = None
    serve_at: Annotated[
        str | None,
        typer.Option("--serve", metavar="ADDRESS", help="Answer clients here as well, and learn from them."),
    ] = None
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run; default runs/NAME.")
    ] = None
    resumption: ResumeOptions = field(default_factory=ResumeOptions)
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="Use this Redis; default: start one.")
    ] = None
    recording: Annotated[
        Path | None,
        typer.Option("--from", metavar="RECORDING", help="Learn from a recording; there are no actors."),
    ] = None
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="With --resume: import what a folder names although it was not made here."
        ),
    ] = False
    assignments: RepeatedAssignments = ()

    def layer(self) -> dict[str, Any]:
        """Return the settings of the given options, nested as in TOML."""
        return _given(
            {
                "seed": self.seed,
                "actor": {"count": self.actors},
                "learner": {
                    "target_return": self.target_return,
                    "total_steps": self.total_steps,
                    "total_episodes": self.episodes,
                    "ranks": self.ranks,
                },
                "broker": {"redis": self.redis},
                "serving": {"listen": self.serve_at},
            }
        )


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _given(value) if isinstance(value, Mapping) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value not in (None, {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Options of how the final policy of a run is played."""

    episodes: Annotated[int | None, typer.Option(min=1, help="Episodes; default: the run's setting.")] = None
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_NUMBER, help="First seed; default: the run's setting.")
    ] = None
    sampled: Annotated[bool, typer.Option("--sampled", help="Sample actions instead of taking the mode.")] = (
        False
    )
    assignments: RepeatedAssignments = ()
    trust: Trust = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Options of the certificates to make."""

    folder: Annotated[Path, typer.Argument(help="Folder to write to.")]
    run: Annotated[str, typer.Option(help="Name of the run whose processes they are for.")]
    hosts: Annotated[
        tuple[str, ...],
        typer.Option(
            "--host", help="Name or address by which broker and Redis are reached; may be repeated."
        ),
    ] = ()
    actors: Annotated[
        tuple[str, ...],
        typer.Option(
            "--actor", help="Also make a certificate that holds for this actor id; may be repeated."
        ),
    ] = ()
    days: Annotated[float, typer.Option(callback=finite, help="How long they hold.")] = 90.0
    users: Annotated[
        Path | None,
        typer.Option(
            "--redis-users", help="ACL file (deploy/redis/users.acl) to give a password to each user of."
        ),
    ] = None
    passwords: Annotated[
        tuple[str, ...],
        typer.Option("--password", help="Also make a password, NAME.password, once; may be repeated."),
    ] = ()
