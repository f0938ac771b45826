"""The sections that a run specification carries, and what of them is this process's own."""

import logging
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.config.settings import (
    ActorSection,
    EnvironmentSection,
    EvaluationSection,
    PolicySection,
    Section,
)
from penstock.config.trusted import placed
from penstock.config.workload import Workload
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import Fatal

S = TypeVar("S", bound=Section)
K = TypeVar("K", EnvironmentSection, PolicySection)

_LOCAL = ("threads", "outbox_fragments", "stall_timeout_s")
"""Knobs of the actor section that a process may set for itself."""
_THE_RUNS = ("unroll_length", "compress")
"""Those that shape the experience: the same for every actor of the run."""

log = logging.getLogger(__name__)


def actor_section(specification: RunSpecification) -> ActorSection:
    """Return the section of the run; raises Fatal for another version of penstock."""
    return _section(ActorSection, "actor", specification.actor_json)


def environment_section(specification: RunSpecification) -> EnvironmentSection:
    """Return the section of the run; raises Fatal for another version of penstock."""
    return _section(EnvironmentSection, "environment", specification.environment_json)


def policy_section(specification: RunSpecification) -> PolicySection:
    """Return the section of the run; raises Fatal for another version of penstock."""
    return _section(PolicySection, "policy", specification.policy_json)


def evaluation_section(specification: RunSpecification) -> EvaluationSection:
    """Return the section of the run; raises Fatal for another version of penstock."""
    return _section(EvaluationSection, "evaluation", specification.evaluation_json)


def at_places(name: str, section: K, workload: Workload, local: ActorSection) -> K:
    """Return the section with this machine's places for those its keyword arguments name.

    Raises ConfigurationError for a place that is not given here.
    """
    kwargs = placed(f"{name}.kwargs", section.kwargs, workload.places, local.places)
    return section.model_copy(update={"kwargs": kwargs})


def overlay(of_run: ActorSection, local: ActorSection) -> ActorSection:
    """Return the actor section of the run with what this process decides for itself.

    of_run: of the run. local: of this process; where it sets what the run decides, it is warned and ignored.
    """
    for key in _THE_RUNS:
        here, run = getattr(local, key), getattr(of_run, key)
        if key in local.model_fields_set and here != run:
            log.warning("ignored: the run decides", extra={"key": f"actor.{key}", "here": here, "told": run})
    own: dict[str, Any] = {key: getattr(local, key) for key in _LOCAL if key in local.model_fields_set}
    own |= {"ack_journal": local.ack_journal, "places": local.places}  # never a path from the wire
    return of_run.model_copy(update=own)


def _section(kind: type[S], name: str, text: str) -> S:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        raise Fatal(f"run specification, section {name}: {wrong}; run the same version everywhere") from error
