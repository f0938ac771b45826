"""A policy that acts by the values of its actions."""

from torch import Tensor

from penstock.config.settings import PolicySection
from penstock.policy.actor_critic import Outputs
from penstock.policy.masking import masked
from penstock.policy.networks import Inputs
from penstock.policy.policy import Policy
from penstock.protocol.spaces import Space


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
        """Return Q of every action, masked, as parameters, and the largest as value."""
        actor, critic, _ = self._features(inputs)
        values: Tensor = self.actor_head(actor)
        if self.combines_heads:
            values = self.critic_head(critic) + values - values.mean(-1, keepdim=True)
        values = masked(values, inputs.forbidden)
        return Outputs(values, values.amax(-1))

    def value_of(self, inputs: Inputs) -> Tensor:
        """Return the value of the best action, [M]."""
        return self.outputs(inputs).value
