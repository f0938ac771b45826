"""The network that acts and is trained."""

from typing import Literal

from penstock.runtime.sections.section import NonNegative, Positive, Section


class PolicySection(Section):
    """The network that acts and is trained."""

    hidden_sizes: tuple[Positive, ...] = (64, 64)
    """Widths of the hidden layers of the MLP."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    shared_trunk: bool = False
    """True: actor and critic share all but their last layer."""
    normalise_observations: bool = False
    """Keep a running mean and variance of the observations as part of the weights."""
    observation_clip: NonNegative = 10.0
    """Normalised observations are clipped to ± this many standard deviations."""
    continuous: Literal["clipped", "squashed"] = "clipped"
    """clipped: diagonal Gaussian, actions clipped to the bounds by the environment side; squashed: tanh of a Gaussian."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of Gaussian actions."""
    state_dependent_std: bool = False
    """Standard deviations of squashed Gaussian actions are outputs of the network; false: parameters of their own. SAC sets it."""
    discrete: Literal["categorical", "epsilon_greedy"] = "categorical"
    """What outputs for a choice of n are. categorical: logits; epsilon_greedy: action values, the best is taken but for a share ε. DQN sets it."""
    dueling: bool = False
    """Action values are the critic's value plus advantages (Wang et al. 2016); with `shared_trunk` both are read from one trunk."""
