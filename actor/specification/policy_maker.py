"""The policy of a run for a process that answers one request at a time, and what it answers to the probe."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.actor.specification.run import at_places, policy_section
from penstock.config.settings import ActorSection, ConfigurationError
from penstock.config.trusted import check_trusted
from penstock.config.workload import find, load
from penstock.protocol.specification import Probe, RunSpecification

if TYPE_CHECKING:
    from penstock.policy.policy import Policy


def policy_maker(
    specification: RunSpecification, local: ActorSection | None = None
) -> "Callable[[], Policy]":
    """Return what makes the policy of a run that is asked for one action at a time.

    local: the settings of this process; None: it trusts no module. Raises as
    `penstock.actor.specification.run.read`; what is returned raises ConfigurationError for a policy that
    gives no single actions.
    """
    local = local or ActorSection()
    workload = find(specification.workload)
    section = at_places("policy", policy_section(specification), workload, local)
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


def probe_answer(policy: "Policy", probe: Probe) -> tuple[float, ...]:
    """Return the log-probabilities of the probe's actions under the outputs that the policy acts with."""
    # Copies: torch does not take the read-only views of a message.
    observation = {path: array.copy() for path, array in probe.observation.items()}
    action = {path: array.copy() for path, array in probe.action.items()}
    return tuple(policy.acting_log_prob(observation, action).tolist())
