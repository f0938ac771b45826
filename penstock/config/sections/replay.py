"""How the learner learns from replay: a section each for DQN and SAC, chosen by `algorithm.name`."""

from typing import Annotated, Literal

from penstock.config.sections.algorithm_section import AlgorithmSection
from penstock.config.sections.policy_section import PolicySection
from penstock.config.sections.section import ADVANCED, Fraction, NonNegative, Positive, PositiveReal


class ReplaySection(AlgorithmSection):
    """What algorithms have in common that learn many times from what they remember."""

    capacity: Positive = 100_000
    """Transitions in replay; the log keeps what they were made of, see `broker.max_log_entries`."""
    capacity_bytes: Positive = 128 * 1024 * 1024
    """Payload bytes of the log that replay holds on to; its memory in the learner is about twice that."""
    learning_starts: Positive = 1000
    """Transitions in replay before the first gradient step."""
    batch_size: Positive = 128
    """Transitions of a gradient step."""
    replay_ratio: PositiveReal = 1.0
    """Gradient steps for every environment step that enters replay."""
    error_steps: Positive = 1024
    """How far inserted and gradient steps may be from the replay ratio, in environment steps."""
    n_step: Positive = 1
    """Steps that a target looks ahead within a fragment."""
    prioritised: bool = False
    """Sample in proportion to the last temporal-difference error (Schaul et al. 2016); false: uniformly."""
    priority_exponent: Fraction = 0.6
    """α of the priorities."""
    importance_exponent: Fraction = 0.4
    """β of the importance weights at the start; rises to 1 over `learner.total_steps`."""
    learning_rate: NonNegative = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over `learner.total_steps`."""
    adam_epsilon: Annotated[NonNegative, ADVANCED] = 1e-8
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.0
    """Gradients are scaled down to this norm; 0: off."""
    target_period: Positive = 1
    """Gradient steps between two moves of the target network."""
    target_rate: Fraction = 0.005
    """Share of the way to the learned network that the target network moves (τ); 1: it becomes a copy."""
    publish_period: Positive = 32
    """Gradient steps between two publications, at least."""


class DQNSection(ReplaySection):
    """Deep Q-network: value-based, for one choice of n."""

    name: Literal["dqn"] = "dqn"
    """Which algorithm, a choice."""
    double: bool = True
    """The learned network chooses the next action, the target network values it (van Hasselt et al. 2016)."""
    max_gradient_norm: NonNegative = 10.0
    """Gradients are scaled down to this norm; 0: off."""
    target_period: Positive = 500
    """Gradient steps between two moves of the target network."""
    target_rate: Fraction = 1.0
    """Share of the way to the learned network that the target network moves (τ); 1: it becomes a copy."""
    epsilon_initial: Fraction = 1.0
    """ε at the start: the share of actions that are drawn uniformly."""
    epsilon_final: Fraction = 0.05
    """ε from the end of its descent on."""
    epsilon_fraction: Fraction = 0.1
    """Share of `learner.total_steps` over which ε falls linearly; 0: it is `epsilon_final` from the start."""
    epsilon_spread: NonNegative = 0.0
    """α of Ape-X: environment i of N acts with ε^(1 + α·i/(N−1)) (Horgan et al. 2018: 7); 0: all alike."""

    def policy_section(self, section: PolicySection) -> PolicySection:
        """Action values in place of logits; a second network only where there are two streams."""
        trunk = section.shared_trunk if section.dueling else True
        return section.model_copy(update={"discrete": "epsilon_greedy", "shared_trunk": trunk})


class SACSection(ReplaySection):
    """Soft actor-critic: for continuous actions between bounds."""

    name: Literal["sac"] = "sac"
    """Which algorithm, a choice."""
    batch_size: Positive = 256
    """Transitions of a gradient step."""
    critic_hidden_sizes: tuple[Positive, ...] = (256, 256)
    """Widths of the hidden layers of each of the two critics."""
    critic_activation: Literal["tanh", "relu", "elu", "silu"] = "relu"
    """Their non-linearity."""
    temperature: PositiveReal = 1.0
    """Weight of the entropy (α); where it is tuned, the first."""
    tune_temperature: bool = True
    """Adjust the temperature so that the entropy comes to `target_entropy`."""
    target_entropy: float | None = None
    """Entropy of the actions, squashed to (−1, 1), in nats; none: minus the number of action elements."""

    def policy_section(self, section: PolicySection) -> PolicySection:
        """A squashed Gaussian whose width depends on the observation; the critics are the learner's own."""
        return section.model_copy(
            update={"continuous": "squashed", "state_dependent_std": True, "shared_trunk": True}
        )
