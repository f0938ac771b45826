"""The options of `penstock train`: what the user asked for, and the layer of settings that it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from penstock.config.flags import Flag
from penstock.learner.checkpoint.resume_options import ResumeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; None: not said. assignments: those of `--set`, in their order."""

    what: Annotated[
        str | None,
        Flag(metavar="[ENV_OR_CONFIG]", help="Gymnasium id, .toml file, or with --resume a run's folder."),
    ] = None
    actors: Annotated[
        int | None, Flag(name="--actors", least=0, help="Rollout workers; 0: only clients of --serve act.")
    ] = None
    ranks: Annotated[
        int | None, Flag(name="--ranks", least=1, help="Learner processes that share each update.")
    ] = None
    seed: Annotated[int | None, Flag(name="--seed", least=0, help="Seed of the run.")] = None
    target_return: Annotated[
        float | None, Flag(name="--target-return", help="Mean return that counts as solved.")
    ] = None
    total_steps: Annotated[
        int | None, Flag(name="--total-steps", least=1, help="Environment steps at most.")
    ] = None
    episodes: Annotated[
        int | None, Flag(name="--episodes", least=1, help="Training episodes at most, of all actors.")
    ] = None
    serve_at: Annotated[
        str | None,
        Flag(name="--serve", metavar="ADDRESS", help="Answer clients here as well, and learn from them."),
    ] = None
    run_dir: Annotated[Path | None, Flag(name="--run-dir", help="Folder of the run; default runs/NAME.")] = (
        None
    )
    resumption: ResumeOptions = field(default_factory=ResumeOptions)
    redis: Annotated[
        str | None, Flag(name="--redis", metavar="URL", help="Use this Redis; default: start one.")
    ] = None
    recording: Annotated[
        Path | None,
        Flag(name="--from", metavar="RECORDING", help="Learn from a recording; there are no actors."),
    ] = None
    trust: Annotated[
        bool,
        Flag(
            name="--trust",
            help="With --resume: import what a folder names although it was not made here.",
        ),
    ] = False
    assignments: tuple[str, ...] = ()

    def layer(self) -> dict[str, Any]:
        """The settings that the options stand for, nested as TOML; without those that were not said."""
        return _said(
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


def _said(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _said(value) if isinstance(value, Mapping) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value not in (None, {})}
