"""A run specification as it is read here: its sections, and its environments and policy in this process.

The specification comes over the network, so it names only what is installed here: a workload by entry
point, an environment by its Gymnasium id. The module of an id or of a network is imported only when
`actor.allow_modules` of this process (never of the specification) holds it.
"""

from dataclasses import dataclass

from penstock.actor.acting.local_policy import LocalPolicy
from penstock.actor.acting.masks import Masks
from penstock.actor.acting.reward import potentials
from penstock.actor.acting.stepper import Stepper
from penstock.actor.specification.sections import (
    actor_section,
    at_places,
    environment_section,
    evaluation_section,
    overlay,
    policy_section,
)
from penstock.config.settings import ActorSection, EnvironmentSection, EvaluationSection, PolicySection
from penstock.config.trusted import check_trusted
from penstock.config.workload import Workload, find, load
from penstock.policy.acting.acting_policy import ActingPolicy
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import Fatal


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
        """Make a policy that waits for its first weights."""
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
    workload = find(specification.workload)
    run = Run(
        specification=specification,
        environment=at_places("environment", environment_section(specification), workload, local),
        policy=at_places("policy", policy_section(specification), workload, local),
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
