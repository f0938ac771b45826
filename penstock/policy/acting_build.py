"""Make what acts from its section of the settings."""

from penstock.config.settings import PolicySection
from penstock.policy.acting.acting_policy import ActingPolicy
from penstock.policy.acting.array_policy import ArrayPolicy, is_enough
from penstock.protocol.spaces import Space


def build_acting(
    observation_space: Space, action_space: Space, section: PolicySection, seed: int
) -> ActingPolicy:
    """Return a policy for the weights of `penstock.policy.policy.build`, which acts once they are loaded.

    Uses numpy alone where that suffices: torch would take most of the start-up time and memory of a small
    actor. Arguments and errors are those of `penstock.policy.policy.build`.
    """
    if is_enough(observation_space, section):
        return ArrayPolicy(observation_space, action_space, section, seed)
    from penstock.policy.policy import build  # noqa: PLC0415 - loads torch

    return build(observation_space, action_space, section, seed)
