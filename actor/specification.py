"""A run specification as it is read here: its sections, and its environments and policy in this process.

The specification comes over the network, so it names only what is installed here: a workload by entry
point, an environment by its Gymnasium id. The module of an id or of a network is imported only when
`actor.allow_modules` of this process (never of the specification) holds it.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from penstock.actor.acting.masks import Masks, potentials
from penstock.actor.acting.stepper import Stepper
from penstock.actor.link.session import Session, Weights
from penstock.config.settings import (
    ActorSection,
    ConfigurationError,
    EnvironmentSection,
    EvaluationSection,
    PolicySection,
    Section,
)
from penstock.config.trusted import check_trusted, placed
from penstock.config.workload import Workload, find, load, place_keys
from penstock.policy.acting.acting_policy import ActingPolicy
from penstock.policy.acting.drawing import ExplorationSlots
from penstock.protocol.messages import Publication
from penstock.protocol.specification import Probe, RunSpecification
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal

if TYPE_CHECKING:
    from penstock.policy.policy import Policy

# ---- The sections that a run specification carries, and what of them is this process's own.

S = TypeVar("S", bound=Section)
K = TypeVar("K", EnvironmentSection, PolicySection)

_LOCAL = ("threads", "outbox_fragments", "stall_timeout_s")
"""Knobs of the actor section that a process may set for itself."""
_THE_RUNS = ("unroll_length", "compress")
"""Those that shape the experience: the same for every actor of the run."""

log = logging.getLogger(__name__)


def actor_section(specification: RunSpecification) -> ActorSection:
    return _section(ActorSection, "actor", specification.actor_json)


def environment_section(specification: RunSpecification) -> EnvironmentSection:
    return _section(EnvironmentSection, "environment", specification.environment_json)


def policy_section(specification: RunSpecification) -> PolicySection:
    return _section(PolicySection, "policy", specification.policy_json)


def evaluation_section(specification: RunSpecification) -> EvaluationSection:
    return _section(EvaluationSection, "evaluation", specification.evaluation_json)


def at_places(name: str, section: K, keys: Collection[str], local: ActorSection) -> K:
    """Put this machine's places in for those that keyword arguments name; raises ConfigurationError."""
    kwargs = placed(f"{name}.kwargs", section.kwargs, keys, local.places)
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
    """Raise Fatal for another version of penstock."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        raise Fatal(f"run specification, section {name}: {wrong}; run the same version everywhere") from error


# ---- The local policy copy: applies publications between fragments and answers the run's probe. The answer
# shows which weights this actor really acts with: log-probabilities of fixed actions, by the forward pass
# that also draws the actions.


class LocalPolicy:
    """A policy and the publication it holds; version 0 before the first."""

    def __init__(self, policy: ActingPolicy, probe: Probe) -> None:
        self.policy = policy
        self.place = ExplorationSlots()
        """Which of the run's environments it acts in, for exploration that differs between them."""
        self.publication = Publication()
        self._probe = probe

    def apply(self, weights: Weights) -> None:
        """Act with these weights from now on; raises Fatal when they do not fit the policy."""
        try:
            self.policy.load(weights.blob)
        except ValueError as error:
            raise Fatal(f"weights {weights.publication.version} cannot be applied: {error}") from error
        self.policy.explore(weights.scalars, self.place)
        self.publication = weights.publication
        metrics.WEIGHT_VERSION_APPLIED.set(weights.publication.version)
        metrics.WEIGHT_APPLY_SECONDS.observe(time.monotonic() - weights.arrived_s)

    def follow(self, session: Session) -> None:
        weights = session.weights
        if weights is not None and weights.publication.version > self.publication.version:
            self.apply(weights)
            self.answer_probe(session)

    def answer_probe(self, session: Session) -> None:
        """Have the session say which weights are applied, and the probe's log-probabilities under them."""
        session.report_applied(self.publication, probe_answer(self.policy, self._probe))


def probe_answer(policy: ActingPolicy, probe: Probe) -> tuple[float, ...]:
    """Return the log-probabilities of the probe's actions under the outputs that the policy acts with."""
    # Copies: torch does not take the read-only views of a message.
    observation = {path: array.copy() for path, array in probe.observation.items()}
    action = {path: array.copy() for path, array in probe.action.items()}
    return tuple(policy.acting_log_prob(observation, action).tolist())


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
        """Make `count` environments; raises ConfigurationError when they cannot be made.

        section: what is to be made. seed: of the first one; the others follow from it.
        """
        environment = load(self.workload.environment)(section, count, seed)
        masks = Masks(section.mask_key, self.specification.action_space, count) if section.mask_key else None
        return Stepper(environment, self.specification.observation_space, masks)

    def make_policy(self, seed: int) -> LocalPolicy:
        specification = self.specification
        policy: ActingPolicy = load(self.workload.acting or self.workload.policy)(
            specification.observation_space, specification.action_space, self.policy, seed
        )
        return LocalPolicy(policy, specification.probe)


def read(specification: RunSpecification, local: ActorSection) -> Run:
    """Read the specification with the settings of this process.

    Raises ConfigurationError for a workload or a module that this process does not have or allow, Fatal for a
    specification of another version of penstock, or spaces that differ from this machine's environment.
    """
    workload, environment = find(specification.workload), environment_section(specification)
    keys = place_keys(specification.workload, environment.id)
    run = Run(
        specification=specification,
        environment=at_places("environment", environment, keys, local),
        policy=at_places("policy", policy_section(specification), keys, local),
        actor=overlay(actor_section(specification), local),
        evaluation=evaluation_section(specification),
        workload=workload,
    )
    check_trusted("environment.id", run.environment.id, local.allow_modules)
    check_trusted("policy.network", run.policy.network, local.allow_modules)
    for potential in potentials(run.environment):
        check_trusted("environment.reward", potential, local.allow_modules)
    _check_spaces(run)
    return run


def _check_spaces(run: Run) -> None:
    observation, action = load(run.workload.spaces)(run.environment)
    for name, own, in_run in (
        ("observation_space", observation, run.specification.observation_space),
        ("action_space", action, run.specification.action_space),
    ):
        if own != in_run:
            raise Fatal(
                f"{name}: {run.environment.id} has {own} on this machine and {in_run} in the run; "
                "install the same version of the environment"
            )


# ---- The policy for a process that answers one request at a time.


def policy_maker(
    specification: RunSpecification, local: ActorSection | None = None
) -> "Callable[[], Policy]":
    """Return a function that makes the policy of a run for single actions.

    local: the settings of this process; None: it trusts no module. Raises as
    `read`; the function raises ConfigurationError for a policy that
    gives no single actions.
    """
    local = local or ActorSection()
    workload = find(specification.workload)
    keys = place_keys(specification.workload, environment_section(specification).id)
    section = at_places("policy", policy_section(specification), keys, local)
    check_trusted("policy.network", section.network, local.allow_modules)
    make = load(workload.policy)

    def one() -> "Policy":
        from penstock.policy.policy import Policy  # noqa: PLC0415 - loads torch

        spaces = specification.observation_space, specification.action_space
        policy: object = make(*spaces, section, specification.seed)
        if not isinstance(policy, Policy):
            raise ConfigurationError(
                f"workload={workload.name!r}: its {type(policy).__name__} gives no single actions, so it is "
                "neither served nor exported as ONNX"
            )
        return policy

    return one
