"""Runs whose goals are commands of a live host: an injector carries them out, actors only by `actors_act`."""

from pathlib import Path
from typing import Final

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import EnvironmentSection, Progress, Rehearsal, Settings
from penstock.config.workload import load

SOLVED: Final = 24.5
"""Mean return that counts as solved on the simulated host: 0.95 of its optimum."""


def target(section: EnvironmentSection) -> float | None:
    """Return the mean return that counts as solved; that of `Goals-v0` is the simulated host's alone."""
    registered: float | None = load("penstock.workloads.control.environment:target")(section)
    return SOLVED if _has_goals(section) and not _is_live(section) else registered


def prepare(settings: Settings, folder: Path, progress: Progress) -> Settings:
    """Return the settings of a run; one of a live host is not evaluated, and its actors are checked."""
    del folder, progress
    if not _is_live(settings.environment):
        return settings
    _check_actors(settings)
    return settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"episodes": 0})})


def rehearse(settings: Settings, folder: Path, progress: Progress) -> Rehearsal:
    del folder, progress
    if _is_live(settings.environment):
        raise ConfigurationError(
            "--dry-run: environment.kwargs.executor='commands': the short run would carry out goals on this "
            "host; predict the run with environment.kwargs.executor='simulated'"
        )
    return Rehearsal(settings=settings)


def _has_goals(section: EnvironmentSection) -> bool:
    return section.id.rpartition(":")[2] == "Goals-v0"


def _is_live(section: EnvironmentSection) -> bool:
    return _has_goals(section) and section.kwargs.get("executor", "simulated") != "simulated"


def _check_actors(settings: Settings) -> None:
    count, slots = settings.actor.count, settings.environment.count
    if count and settings.environment.kwargs.get("actors_act") is not True:
        raise ConfigurationError(
            f"actor.count={count}: actors would carry out goals on this host without the rules of `penstock "
            "inject`; say --actors 0 --serve ADDRESS, or --set environment.kwargs.actors_act=true"
        )
    if count * slots > 1:
        raise ConfigurationError(
            f"actor.count={count}, environment.count={slots}: so many environments would act on one host at "
            "once; set both to 1"
        )
