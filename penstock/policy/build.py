"""Make a policy from its section of the settings."""

import math

import torch

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.networks import Body, initialise
from penstock.policy.policy import Policy
from penstock.policy.q_policy import QPolicy
from penstock.protocol.spaces import Space

POLICY_GAIN = 0.01
HIDDEN_GAIN = math.sqrt(2.0)


def build(observation_space: Space, action_space: Space, section: PolicySection, seed: int) -> Policy:
    """A policy with freshly initialised weights; equal arguments give equal weights.

    Orthogonal weights with gain √2 in hidden layers, 0.01 before the actions, 1 before the value
    (Andrychowicz et al. 2021), or with `initialisation="xavier"` those of Glorot and Bengio (2010) in all
    of them, zero biases; a custom network and a recurrent core initialise themselves.

    Raises ValueError that names field and space when a space cannot be handled, and what can, and
    ConfigurationError for a custom network that breaks its contract and for `kwargs`, of which there are
    none here.
    """
    if section.kwargs:
        raise ConfigurationError(
            f"policy.kwargs={section.kwargs}: this workload's policy takes none; leave it out"
        )
    kind = QPolicy if section.discrete == "epsilon_greedy" else Policy
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        policy = kind(observation_space, action_space, section)
    generator = torch.Generator().manual_seed(seed)
    gains: tuple[float | None, ...] = (HIDDEN_GAIN, POLICY_GAIN, 1.0)
    hidden, acting, valuing = gains if section.initialisation == "orthogonal" else (None,) * 3
    for body in (policy.actor_body, policy.critic_body):
        if isinstance(body, Body):
            initialise(body, hidden, generator)
    for core in (policy.memory.actor_core, policy.memory.critic_core):
        if core is not None:
            core.initialise(generator)
    initialise(policy.actor_head, acting, generator)
    initialise(policy.critic_head, valuing, generator)
    policy.seed_actions(seed)
    # For good: whatever differs in training mode would fake a ratio between actor and learner.
    return policy.eval()
