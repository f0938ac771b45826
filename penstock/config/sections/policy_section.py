"""The network that acts and is trained."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.sections.section import ADVANCED, Count, NonNegative, Positive, Section


class PolicySection(Section):
    """The network that acts and is trained."""

    network: str = ""
    """Network between observations and heads as `module:Class`, see docs/policies.md.

    Empty: trunks and an MLP.
    """
    network_arguments: dict[str, Any] = {}
    """Arguments of that class."""
    kwargs: Annotated[dict[str, Any], ADVANCED] = {}
    """What a workload with a policy of its own kind must know of it, such as the language model to train."""
    hidden_sizes: tuple[Positive, ...] = (64, 64)
    """Widths of the hidden layers of the MLP."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    hidden_norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation between a hidden layer and its non-linearity.

    Batch: with statistics that are part of the weights.
    """
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of hidden features dropped where the learner differentiates; nobody acts with dropped ones."""
    image_trunk: Literal["auto", "nature", "small", "impala"] = "auto"
    """Convolutions of uint8 images: Nature, two of 3x3, or IMPALA's residual network.

    Auto: Nature from 36 pixels on, else small.
    """
    shared_trunk: bool = False
    """True: actor and critic share all but their last layer."""
    normalise_observations: bool = False
    """Keep a running mean and variance of the observations as part of the weights."""
    observation_clip: Annotated[NonNegative, ADVANCED] = 10.0
    """Normalised observations are clipped to ± this many standard deviations."""
    continuous: Literal["clipped", "squashed"] = "clipped"
    """clipped: diagonal Gaussian, actions clipped to the bounds by the environment side.

    Squashed: tanh of a Gaussian.
    """
    initial_log_std: Annotated[float, ADVANCED] = 0.0
    """Initial log standard deviation of Gaussian actions."""
    state_dependent_std: Annotated[bool, ADVANCED] = False
    """Standard deviations of squashed Gaussian actions are outputs of the network.

    False: parameters of their own. SAC sets it.
    """
    discrete: Annotated[Literal["categorical", "epsilon_greedy"], ADVANCED] = "categorical"
    """What outputs for a choice of n are.

    categorical: logits; epsilon_greedy: action values, the best is taken but for a share ε. DQN sets it.
    """
    dueling: Annotated[bool, ADVANCED] = False
    """Action values are the critic's value plus advantages (Wang et al. 2016).

    With `shared_trunk` both are read from one trunk.
    """
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A recurrent core between the hidden layers and what comes out; with separate trunks one for each."""
    recurrent_size: Positive = 64
    """Width of the core's state."""
    burn_in: Count = 0
    """First steps of each fragment that only refresh the recurrent state and are not learned from.

    Fewer than `actor.unroll_length`.
    """
    frame_stack: Positive = 1
    """Observations that the policy sees at once, the newest and those before it in the episode.

    Each is sent once.
    """
