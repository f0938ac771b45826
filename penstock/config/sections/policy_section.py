"""The network that acts and is trained."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config.sections.section import ADVANCED, Count, NonNegative, Section, Width
from penstock.protocol.limits import MAX_STEPS


class PolicySection(Section):
    """The network that acts and is trained."""

    network: str = ""
    """Network between observations and heads, `module:Class` (docs/policies.md); empty: trunks and an MLP."""
    network_arguments: dict[str, Any] = {}
    """Arguments of that class."""
    kwargs: Annotated[dict[str, Any], ADVANCED] = {}
    """What a workload with a policy of its own kind must know of it, such as the language model to train."""
    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Widths of the hidden layers of the MLP."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    hidden_norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation between hidden layer and non-linearity; batch: its statistics are part of the weights."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of hidden features dropped where the learner differentiates; actors act with all of them."""
    initialisation: Annotated[Literal["orthogonal", "xavier"], ADVANCED] = "orthogonal"
    """First weights, biases are 0; orthogonal: small before the actions; xavier: uniform (Glorot 2010)."""
    image_trunk: Literal["auto", "nature", "small", "impala"] = "auto"
    """Convolutions of images: Nature, two of 3x3, or IMPALA's; auto: Nature from 36 pixels on, else small."""
    shared_trunk: bool = False
    """True: actor and critic share all but their last layer."""
    normalise_observations: bool = False
    """Keep a running mean and variance of the observations as part of the weights."""
    observation_clip: Annotated[NonNegative, ADVANCED] = 10.0
    """Normalised observations are clipped to ± this many standard deviations."""
    continuous: Literal["clipped", "squashed"] = "clipped"
    """clipped: diagonal Gaussian, clipped to the bounds by the environment side; squashed: tanh of one."""
    initial_log_std: Annotated[float, Field(ge=-20.0, le=20.0), ADVANCED] = 0.0
    """Initial log standard deviation of Gaussian actions."""
    state_dependent_std: Annotated[bool, ADVANCED] = False
    """The network outputs the deviations of squashed Gaussians, as in SAC; false: they are parameters."""
    discrete: Annotated[Literal["categorical", "epsilon_greedy"], ADVANCED] = "categorical"
    """Outputs of a choice. categorical: logits; epsilon_greedy: action values, the best but for a share ε."""
    dueling: Annotated[bool, ADVANCED] = False
    """Action values are the critic's value plus advantages (Wang et al. 2016); `shared_trunk`: one trunk."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A recurrent core between the hidden layers and what comes out; with separate trunks one for each."""
    recurrent_size: Width = 64
    """Width of the core's state."""
    burn_in: Count = 0
    """First steps of each fragment that only refresh the state; fewer than `actor.unroll_length`."""
    frame_stack: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 1
    """Observations of an episode that the policy sees at once, the newest ones; each is sent once."""
