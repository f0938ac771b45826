"""What an actor makes of a run specification: its sections, its environments, its policy.

The specification comes over the network, so it names only what is installed here: a workload by entry
point, an environment by its Gymnasium id. The module of an id or of a network is imported only when
`actor.allow_modules` of this process (never of the specification) holds it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from actor.rollout.local_policy import LocalPolicy
from actor.rollout.masks import Masks
from actor.rollout.reward import potentials
from actor.rollout.stepper import Stepper
from penstock.config.settings import (
    ActorSection,
    ConfigurationError,
    EnvironmentSection,
    EvaluationSection,
    PolicySection,
    Section,
)
from penstock.config.trusted import check_trusted, placed
from penstock.config.workload import Workload, find, load
from penstock.policy.policy import Policy
from penstock.runtime.exit import Fatal
from penstock.wire.specification import Probe, RunSpecification

S = TypeVar("S", bound=Section)
K = TypeVar("K", EnvironmentSection, PolicySection)

_LOCAL = ("threads", "outbox_fragments", "stall_timeout_s")
"""Knobs of the actor section that a process may set for itself."""
_THE_RUNS = ("unroll_length", "compress")
"""Those that shape the experience: the same for every actor of the run."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A specification, read."""

    specification: RunSpecification
    environment: EnvironmentSection
    policy: PolicySection
    actor: ActorSection
    evaluation: EvaluationSection
    workload: Workload

    def make_environment(self, section: EnvironmentSection, count: int, seed: int) -> Stepper:
        """`count` environments; raises ConfigurationError when they cannot be made."""
        environment = load(self.workload.environment)(section, count, seed)
        masks = Masks(section.mask_key, self.specification.action_space, count) if section.mask_key else None
        return Stepper(environment, self.specification.observation_space, masks)

    def make_policy(self, seed: int) -> LocalPolicy:
        """A policy that waits for its first weights."""
        specification = self.specification
        policy: Policy = load(self.workload.policy)(
            specification.observation_space, specification.action_space, self.policy, seed
        )
        return LocalPolicy(policy, specification.probe)


def read(specification: RunSpecification, local: ActorSection) -> Run:
    """The run of a specification.

    Raises ConfigurationError for a workload or a module that this process does not have or allow, Fatal for a
    specification of another version of penstock, or spaces that differ from this machine's environment.
    """
    workload = find(specification.workload)
    run = Run(
        specification=specification,
        environment=_placed("environment", environment_section(specification), workload, local),
        policy=_placed("policy", _policy_section(specification), workload, local),
        actor=_overlay(_section(ActorSection, "actor", specification.actor_json), local),
        evaluation=_section(EvaluationSection, "evaluation", specification.evaluation_json),
        workload=workload,
    )
    check_trusted("environment.id", run.environment.id, local.allow_modules)
    check_trusted("policy.network", run.policy.network, local.allow_modules)
    for potential in potentials(run.environment):
        check_trusted("environment.reward", potential, local.allow_modules)
    _check_spaces(run)
    return run


def policy_maker(specification: RunSpecification, local: ActorSection | None = None) -> Callable[[], Policy]:
    """What makes the policy of a run, for somebody who asks it for one action at a time; raises as `read`.

    local: of this process; None: it trusts nothing. Refuses, when called, a policy that answers otherwise.
    """
    local = local or ActorSection()
    workload = find(specification.workload)
    section = _placed("policy", _policy_section(specification), workload, local)
    check_trusted("policy.network", section.network, local.allow_modules)
    make = load(workload.policy)

    def one() -> Policy:
        spaces = specification.observation_space, specification.action_space
        policy: object = make(*spaces, section, specification.seed)
        if not isinstance(policy, Policy):
            raise ConfigurationError(
                f"workload={workload.name!r}: its {type(policy).__name__} gives no single actions, so it is "
                "neither served nor exported as ONNX"
            )
        return policy

    return one


def actor_section(specification: RunSpecification) -> ActorSection:
    """The run's own; raises Fatal for another version of penstock."""
    return _section(ActorSection, "actor", specification.actor_json)


def environment_section(specification: RunSpecification) -> EnvironmentSection:
    """The run's own; raises Fatal for another version of penstock."""
    return _section(EnvironmentSection, "environment", specification.environment_json)


def _policy_section(specification: RunSpecification) -> PolicySection:
    return _section(PolicySection, "policy", specification.policy_json)


def _placed(name: str, section: K, workload: Workload, local: ActorSection) -> K:
    """The section with this machine's places."""
    kwargs = placed(f"{name}.kwargs", section.kwargs, workload.places, local.places)
    return section.model_copy(update={"kwargs": kwargs})


def probe_answer(policy: Policy, probe: Probe) -> tuple[float, ...]:
    """The log-probabilities of the probe's actions under the outputs that the policy acts with."""
    # Copies: torch does not take the read-only views of a message.
    observation = {path: array.copy() for path, array in probe.observation.items()}
    action = {path: array.copy() for path, array in probe.action.items()}
    return tuple(policy.acting_log_prob(observation, action).tolist())


def _section(kind: type[S], name: str, text: str) -> S:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        raise Fatal(f"run specification, section {name}: {wrong}; run the same version everywhere") from error


def _overlay(told: ActorSection, local: ActorSection) -> ActorSection:
    for key in _THE_RUNS:
        here, run = getattr(local, key), getattr(told, key)
        if key in local.model_fields_set and here != run:
            log.warning("ignored: the run decides", extra={"key": f"actor.{key}", "here": here, "told": run})
    own: dict[str, Any] = {key: getattr(local, key) for key in _LOCAL if key in local.model_fields_set}
    own |= {"ack_journal": local.ack_journal, "places": local.places}  # never a path from the wire
    return told.model_copy(update=own)


def _check_spaces(run: Run) -> None:
    observation, action = load(run.workload.spaces)(run.environment)
    for name, own, told in (
        ("observation_space", observation, run.specification.observation_space),
        ("action_space", action, run.specification.action_space),
    ):
        if own != told:
            raise Fatal(
                f"{name}: {run.environment.id} has {own} on this machine and {told} in the run; "
                "install the same version of the environment"
            )
