"""Make a policy from its section of the settings."""

import math

import torch
from torch import Tensor

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.policy.actor_critic import Outputs
from penstock.policy.networks import Body, Inputs, initialise, masked
from penstock.policy.policy import Policy
from penstock.protocol.spaces import Space

# ---- A policy that acts by the values of its actions.


class QPolicy(Policy):
    """A policy with values of actions in place of logits; an observation's value is that of its best action.

    Dueling (Wang et al. 2016, eq. 9): the critic's V and the actor's A make Q = V + A − mean A. Acting needs
    A alone, since V is the same for all actions; so `action_parameters` are A, and the forward pass stays a
    chain of layers.
    """

    def __init__(self, observation_space: Space, action_space: Space, section: PolicySection) -> None:
        super().__init__(observation_space, action_space, section)
        self.combines_heads = section.dueling

    def outputs(self, inputs: Inputs) -> Outputs:
        actor, critic, _ = self._features(inputs)
        values: Tensor = self.actor_head(actor)
        if self.combines_heads:
            values = self.critic_head(critic) + values - values.mean(-1, keepdim=True)
        values = masked(values, inputs.forbidden)
        return Outputs(values, values.amax(-1))

    def value_of(self, inputs: Inputs) -> Tensor:
        return self.outputs(inputs).value


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
