"""Kinds of jobs: what a workload adds to a training that a template describes."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.gateway.jobs.job_records import Conclusion, Job, Outcome
from penstock.registry.registry import Registry

_SHOWN: Final = ("solved", "mean_return", "updates", "policy_version", "training_seconds")


class JobKind(Protocol):
    """What a kind of job needs before it begins, and what is made of it once it has finished.

    `prepare` and `conclude` may be called again for a job, after a gateway was killed in them.
    """

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        """Return what is true of an agent now, for the row of a job; raises an AccountError to refuse it.

        `through` among them is the number of the newest rating that the job reads; without it, it reads none.
        """

    def prepare(
        self, registry: Registry, policy: str, facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Any]:
        """Write what a job reads into its folder; returns the settings that name it.

        policy: `PROJECT/AGENT`, under which the registry has its ratings. facts: of the job.

        Raises OSError where the folder cannot be written.
        """

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        """Return what a finished job came to, with its files where they shall be found.

        taken: labels of the versions that the agent has. folder: of the job, with the run's, `run`, in it;
        the training writes there, so that its files are opened by `penstock.config.run_folder`.
        models: below which models are exported. Raises OSError where files cannot be written, ValueError
        where the run lacks what its kind must leave.
        """


class PlainTraining:
    """A training that needs only its template: its result is what its summary says."""

    def facts(self, registry: Registry, policy: str) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def prepare(
        self, registry: Registry, policy: str, facts: Mapping[str, Any], folder: Path
    ) -> Mapping[str, Any]:
        """Write nothing."""
        return {}

    def conclude(
        self, job: Job, outcome: Outcome, taken: Collection[str], *, folder: Path, models: Path
    ) -> Conclusion:
        """Return the figures of the summary that people ask for first."""
        summary = outcome.summary or {}
        return Conclusion(result={name: finite(summary.get(name)) for name in _SHOWN})


def finite(value: Any) -> Any:
    """Return a value of a summary as JSON has it: a number that is none is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
