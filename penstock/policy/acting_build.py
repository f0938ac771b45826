"""Make what acts from its section of the settings."""

from penstock.config.settings import PolicySection
from penstock.policy.acting.acting_policy import ActingPolicy
from penstock.policy.acting.array_policy import ArrayPolicy, is_enough
from penstock.protocol.spaces import Space


def build_acting(
    observation_space: Space, action_space: Space, section: PolicySection, seed: int
) -> ActingPolicy:
    """Return a policy that acts with the weights of `penstock.policy.policy.build`, once they are loaded.

    It is in numpy alone where that is enough: importing torch takes most of the start of a small actor, and
    most of its memory. Arguments and errors are those of `penstock.policy.policy.build`.
    """
    if is_enough(observation_space, section):
        return ArrayPolicy(observation_space, action_space, section, seed)
    from penstock.policy.policy import build  # noqa: PLC0415 - loads torch

    return build(observation_space, action_space, section, seed)
