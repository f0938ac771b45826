"""Weights & Biases: one of its runs for each of ours, under the same name, over environment steps.

Online it needs a key (`wandb login`, or WANDB_API_KEY); offline it writes below `wandb/` in the run's folder,
for `wandb sync` to send later. The configuration goes along, without section `security` and without
addresses.
"""

from collections.abc import Mapping
from typing import Any

import wandb

from penstock.config.settings import Settings
from penstock.learner.reporting.trackers.tracker import TrackedRun


class WandbRun:
    """An open run."""

    def __init__(self, run: "wandb.Run") -> None:
        self._run = run
        # Their own step only rises, and ours goes back when a learner resumes.
        run.define_metric("*", step_metric="env_steps")

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log({"env_steps": step, **values})

    def close(self) -> None:
        """Finish the run, so that the remaining values are sent."""
        self._run.finish()


def open_tracker(place: TrackedRun) -> WandbRun:
    """Begin the run, or go on with the one of an earlier learner."""
    section = place.settings.metrics
    run = wandb.init(
        project=section.wandb_project,
        name=place.settings.run,
        id=place.settings.run,
        resume="allow",
        mode=section.wandb_mode,
        dir=str(place.run_dir),
        config=configuration(place.settings),
        settings=wandb.Settings(console="off", silent=True),
    )
    return WandbRun(run)


def configuration(settings: Settings) -> dict[str, Any]:
    """Return the part of the configuration that may leave this machine."""
    kept_back: dict[str, Any] = {
        "security": True,
        "broker": {"redis"},
        "registry": {"url"},
        "serving": {"listen"},
    }
    return settings.model_dump(mode="json", exclude=kept_back)
