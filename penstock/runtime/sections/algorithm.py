"""How the learner learns: a section for each algorithm, chosen by `algorithm.name`.

The core reads an `AlgorithmSection`; all else is between a section and its algorithm. A new algorithm
adds its section here, to `AnyAlgorithm`, and its class to `learner.algorithms`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from penstock.runtime.sections.section import Count, Fraction, NonNegative, Positive, Section

DEFAULT_ALGORITHM: Final = "ppo"


class AlgorithmSection(Section):
    """What the core reads of every algorithm."""

    name: str
    """Which algorithm."""
    discount: Fraction = 0.99
    """γ, per step."""

    @property
    def lock_step(self) -> bool:
        """Rounds replace the budget."""
        return False

    @property
    def begun_lag(self) -> float:
        """Updates that experience may lag behind when it is begun; ∞ where experience is remembered."""
        return math.inf

    @property
    def update_steps(self) -> int:
        """Steps that an update takes from the log; 0 where it samples from memory."""
        return 0


class OnPolicySection(AlgorithmSection):
    """What algorithms have in common that learn from each batch once and forget it."""

    batch_steps: Positive = 2048
    """Steps of one update (B)."""
    staleness: Count = 1
    """Updates that experience may lag behind when it is begun (S); 0: lock-step."""
    stale_after: Positive | None = None
    """Fragments older than this many updates at their turn are dropped as stale (H); default 4(S+1)."""
    gae_lambda: Fraction = 0.95
    """λ of GAE and V-trace."""
    value_coefficient: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    normalise_advantages: bool = True
    """Standardise the advantages of each batch over its valid steps."""
    scale_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return (stays in the learner)."""
    learning_rate: NonNegative = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over `learner.total_steps`."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0."""
    adam_epsilon: NonNegative = 1e-5
    """ε of Adam."""
    max_gradient_norm: NonNegative = 0.5
    """Gradients are scaled down to this norm; 0: off."""

    @property
    def lock_step(self) -> bool:
        """S = 0."""
        return self.staleness == 0

    @property
    def begun_lag(self) -> float:
        """S."""
        return self.staleness

    @property
    def update_steps(self) -> int:
        """B."""
        return self.batch_steps


class PPOSection(OnPolicySection):
    """Proximal policy optimisation."""

    name: Literal["ppo"] = "ppo"
    """Which algorithm."""
    epochs: Positive = 4
    """Passes over each batch."""
    minibatches: Positive = 4
    """Gradient steps per epoch."""
    advantage: Literal["gae", "vtrace"] = "gae"
    """How advantages and value targets are estimated, once per batch with the current critic."""
    objective: Literal["decoupled", "coupled"] = "decoupled"
    """decoupled: clip around the policy at batch start (Hilton et al. 2021); coupled: around the behaviour policy."""
    rho_clip: NonNegative = 1.0
    """ρ̄ of V-trace."""
    c_clip: NonNegative = 1.0
    """c̄ of V-trace."""
    behaviour_weight_cap: NonNegative = 5.0
    """Largest π_prox/μ of the decoupled objective."""
    clip_range: NonNegative = 0.2
    """ε of the surrogate."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """linear: ε falls to 0 over `learner.total_steps`."""
    value_clip: NonNegative | None = None
    """Largest change of a value in one update; none: off."""
    target_kl: NonNegative | None = None
    """Stop the epochs of an update when KL(π_prox‖π_θ) exceeds 1.5 times this; none: off."""


class ImpalaSection(OnPolicySection):
    """Importance-weighted actor-learner: V-trace actor-critic, one gradient step per batch."""

    name: Literal["impala"] = "impala"
    """Which algorithm."""
    gae_lambda: Fraction = 1.0
    """λ of V-trace; 1 as published."""
    rho_clip: NonNegative = 1.0
    """ρ̄ of V-trace, for the value targets and for the policy gradient."""
    c_clip: NonNegative = 1.0
    """c̄ of V-trace."""


class ReinforceSection(OnPolicySection):
    """REINFORCE with a learned baseline, one gradient step per batch."""

    name: Literal["reinforce"] = "reinforce"
    """Which algorithm."""
    gae_lambda: Fraction = 1.0
    """λ of GAE; 1: Monte-Carlo returns, bootstrapped only where an unroll ends before its episode."""


def _tag(value: Any) -> str:
    """The algorithm that a section is for, written or made."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return DEFAULT_ALGORITHM if name is None else str(name)


AnyAlgorithm = Annotated[
    Annotated[PPOSection, Tag("ppo")]
    | Annotated[ImpalaSection, Tag("impala")]
    | Annotated[ReinforceSection, Tag("reinforce")],
    Field(description="How the learner learns; `algorithm.name` says which of the sections it is."),
    Discriminator(_tag),
]
"""The section of any algorithm that there is; the default is PPO's."""
